//! The file commands: `codelia cp`, `cat`, `ls`, `rm`, `mkdir`, `mv`, `export`,
//! `import` and `watch`.

mod archive;
mod change;
mod copy;
mod download;
mod hash;
mod interrupt;
mod limits;
mod list;
mod local_entry;
#[cfg(unix)]
mod local_tree;
#[cfg(not(unix))]
#[path = "no_local_tree.rs"]
mod local_tree;
#[cfg(not(unix))]
#[path = "no_partial.rs"]
mod partial;
#[cfg(unix)]
mod partial;
mod progress;
mod remote_file;
mod remote_tree;
mod resume;
mod upload;
mod watch;

pub(crate) use self::{
    archive::{export, import},
    change::{mkdir, mv, rm},
    copy::{cat, cp},
    list::ls,
    watch::watch,
};
