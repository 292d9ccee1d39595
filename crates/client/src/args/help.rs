//! The overview of commands in groups: clap lists subcommands in one.

use std::fmt::Write;

use clap::Command;

/// Commands by what they are for. A command that is missing here is listed at the end.
const GROUPS: [(&str, &str); 5] = [
    ("Runs", "run exec attach logs ps kill diff apply discard trace approvals supervisor"),
    (
        "Sessions and files",
        "session cp cat ls rm mkdir mv export import watch volume policy projects profiles",
    ),
    ("This machine", "up down doctor api worker migrate"),
    ("Administration", "admin certs tenants keys workers flags tools audit"),
    ("Command line", "context config whoami info completions"),
];
const OTHER: &str = "Other commands";

/// Sets the help of the program: its commands under headings.
pub fn with_groups(command: Command) -> Command {
    let styles = command.get_styles().clone();
    let header = styles.get_header();
    let literal = styles.get_literal();
    let mut text = String::new();
    let visible = || command.get_subcommands().filter(|command| !command.is_hide_set());
    let is_grouped = |name| GROUPS.iter().any(|(_, names)| names.split(' ').any(|one| one == name));
    let width = visible().map(|command| command.get_name().len()).max().unwrap_or_default();
    for (title, names) in GROUPS.into_iter().chain([(OTHER, "")]) {
        let listed: Vec<&Command> = match title {
            OTHER => visible().filter(|command| !is_grouped(command.get_name())).collect(),
            _ => names
                .split(' ')
                .filter_map(|name| visible().find(|command| command.get_name() == name))
                .collect(),
        };
        if listed.is_empty() {
            continue;
        }
        // Writing to a string does not fail.
        let _ = writeln!(text, "{header}{title}:{header:#}");
        for command in listed {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            let name = command.get_name();
            let space = " ".repeat(width - name.len());
            let _ = writeln!(text, "  {literal}{name}{literal:#}{space}  {about}");
        }
        text.push('\n');
    }
    let template = format!(
        "{{about}}\n\n{header}Usage:{header:#} {{usage}}\n\n{text}{header}Global options:{header:#}\n{{options}}{{after-help}}"
    );
    command.help_template(template)
}
