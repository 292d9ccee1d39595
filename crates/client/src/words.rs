//! Values of enums as the words that tables show.

use codelia_proto::v1;

/// An enum of the API.
pub(crate) trait Word {
    /// The word of the value, such as `data_lost` of `SESSION_END_REASON_DATA_LOST`. Nothing if it
    /// is unspecified.
    fn word(self) -> String;
}

macro_rules! words {
    ($($name:ident),* $(,)?) => {$(
        impl Word for v1::$name {
            fn word(self) -> String {
                of_name(self.as_str_name(), Self::default().as_str_name())
            }
        }
    )*};
}

words!(
    ApprovalKind,
    ApprovalScope,
    ApprovalState,
    ChangeKind,
    ChangesState,
    DryRunVerdict,
    FileEventKind,
    FileKind,
    FlagAction,
    PolicyScope,
    PolicySource,
    RunState,
    SandboxMode,
    Scope,
    SessionState,
    WorkerState,
);

/// The word of a value by its name and that of the value that is unspecified: both start with the
/// enum's.
pub(crate) fn of_name(name: &str, unspecified: &str) -> String {
    let prefix = unspecified.strip_suffix("UNSPECIFIED").unwrap_or_default();
    match name.strip_prefix(prefix).unwrap_or(name) {
        "UNSPECIFIED" => String::new(),
        word => word.to_lowercase(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_has_no_prefix() {
        assert_eq!(v1::ApprovalKind::NetworkProxy.word(), "network_proxy");
        assert_eq!(v1::SandboxMode::Bwrap.word(), "bwrap");
        assert_eq!(v1::SessionState::Unspecified.word(), "");
    }
}
