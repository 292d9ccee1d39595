//! Arguments of `codelia profiles`.

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub enum Profiles {
    /// List profiles
    #[command(after_help = "\
Examples:
  codelia profiles list
  codelia session create --profile cargo")]
    List,
    /// Show the policy, variables and limits of a profile
    Show {
        /// Name of the profile
        profile: String,
    },
}
