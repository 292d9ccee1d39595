//! A signal that ends a process, on every system.

/// A signal that ends a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    HangUp = 1,
    Interrupt = 2,
    Terminate = 15,
}

impl Signal {
    /// Number of the signal, which is the same on every system.
    #[must_use]
    pub fn number(self) -> i32 {
        self as i32
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::HangUp => "SIGHUP",
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
        }
    }
}
