//! Arguments of `codelia supervisor`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "\
Programs of the same user connect to the socket and exchange one JSON object for each line, such as
{\"type\": \"cmd.approve\", \"id\": \"...\", \"scope\": \"file\", \"persist\": false}. The first decision
counts. Needs a key with the scope `approve`.

Example:
  codelia supervisor --socket /run/user/1000/codelia.sock")]
pub struct Supervisor {
    /// Listen on this Unix socket. Only this user and root can connect
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Serve only approvals of this session
    #[arg(short, long, value_name = "SESSION")]
    pub session: Option<String>,
}
