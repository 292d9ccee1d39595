//! Differences between systems: terminal, signals, streams and permissions of files. All of it is
//! for Unix; others have a part, and say what they lack.

#[cfg(not(unix))]
mod other;
#[cfg(unix)]
mod unix;

#[cfg(not(unix))]
pub(crate) use self::other::*;
#[cfg(unix)]
pub(crate) use self::unix::*;

/// The error for what this system does not have.
#[cfg(not(unix))]
pub(crate) fn unsupported(what: &str) -> std::io::Error {
    std::io::Error::new(
        std::io::ErrorKind::Unsupported,
        format!("{what}: not supported on this system"),
    )
}
