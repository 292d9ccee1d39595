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
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    #[test]
    fn every_command_has_a_page() {
        let dir = tempfile::tempdir().unwrap();
        man(Cli::command(), dir.path()).unwrap();
        let page = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap_or_default();
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = command.get_name();
            assert!(page(&format!("codelia-{name}.1")).contains(".TH"), "{name}");
            let escaped = name.replace('-', "\\-");
            assert!(page("codelia.1").contains(&format!("codelia\\-{escaped}(1)")), "{name}");
        }
        assert!(page("codelia-certs-dev.1").contains("force"));
        assert_eq!(page("codelia-egress.1"), "", "a hidden command has no page");
    }
}
