//! `codelia __man DIR`: the manual pages, for packages. Generated from the arguments like the help.

use std::{fs, path::Path};

use anyhow::{Context, Result};

/// Writes `codelia.1` and a page for every command below it.
pub(crate) fn man(command: clap::Command, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    clap_mangen::generate_to(command.disable_help_subcommand(true), dir)
        .with_context(|| format!("cannot write to {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory};

    use super::*;
    use crate::args::Cli;

    /// Pages in a directory.
    struct Pages<'a>(&'a Path);

    impl Pages<'_> {
        /// Returns a page without the escapes of roff, or nothing if it does not exist.
        fn text(&self, name: &str) -> String {
            let page = fs::read_to_string(self.0.join(format!("{name}.1"))).unwrap_or_default();
            page.replace(r"\-", "-").replace(r"\*(Aq", "'").replace(r"\\", r"\")
        }

        /// Returns what the pages of a command and of all below it lack, with the number of pages.
        fn lacks(&self, command: &Command, name: &str) -> (usize, Vec<String>) {
            let text = self.text(name);
            let about = command.get_about().map(|about| format!("{name} - {about}"));
            let arguments = command.get_arguments().filter(|argument| !argument.is_hide_set());
            let helps = arguments.map(|argument| argument.get_help().map(ToString::to_string));
            let expected = [about].into_iter().chain(helps);
            // An absent text is lacking too.
            let is_lacking =
                |line: &Option<String>| line.as_ref().is_none_or(|line| !text.contains(line));
            let mut lacking: Vec<_> =
                expected.filter(is_lacking).map(|line| format!("{name}.1: {line:?}")).collect();
            let mut pages = 1;
            for below in command.get_subcommands().filter(|command| !command.is_hide_set()) {
                let below_name = format!("{name}-{}", below.get_name());
                if !text.contains(&format!("{below_name}(1)")) {
                    lacking.push(format!("{name}.1: {below_name}(1)"));
                }
                let (number, more) = self.lacks(below, &below_name);
                pages += number;
                lacking.extend(more);
            }
            (pages, lacking)
        }
    }

    #[test]
    fn every_command_and_argument_is_in_the_man_pages() {
        let dir = tempfile::tempdir().unwrap();
        man(Cli::command(), dir.path()).unwrap();
        let pages = Pages(dir.path());
        let (number, lacking) = pages.lacks(&Cli::command(), "codelia");
        assert_eq!(lacking, Vec::<String>::new());
        assert!(number > 80, "only {number} pages");
        assert_eq!(
            fs::read_dir(dir.path()).unwrap().count(),
            number,
            "hidden commands have no page"
        );
    }

    #[test]
    fn command_without_page_or_help_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let documented = Command::new("a").about("It's one").arg(clap::arg!(--"x-y" "Do x"));
        man(documented.clone(), dir.path()).unwrap();
        let pages = Pages(dir.path());
        assert_eq!(pages.lacks(&documented, "a"), (1, Vec::new()));
        let wider = documented.arg(clap::arg!(--z)).subcommand(Command::new("b").about("Another"));
        let lacking = ["a.1: None", "a.1: a-b(1)", "a-b.1: Some(\"a-b - Another\")"];
        assert_eq!(pages.lacks(&wider, "a"), (2, lacking.map(str::to_owned).to_vec()));
    }
}
