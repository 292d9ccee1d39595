//! Words that the store and the protocol have in common: the variants of an enum have the same names
//! in both, and a message also has `Unspecified`.

use codelia_proto::v1;
use codelia_store as store;

use super::validate::enum_value;
use crate::error::ApiError;

/// An enum of the store that messages have as well.
pub(crate) trait Word: Sized {
    /// The enum of the messages.
    type Wire: TryFrom<i32>;

    /// The number in a message.
    fn number(self) -> i32;

    /// The word of a message; `None` for `Unspecified`.
    fn from_wire(wire: Self::Wire) -> Option<Self>;
}

macro_rules! words {
    ($($name:ident { $($word:ident),+ })+) => {$(
        impl Word for store::$name {
            type Wire = v1::$name;

            fn number(self) -> i32 {
                match self {
                    $(Self::$word => v1::$name::$word.into(),)+
                }
            }

            fn from_wire(wire: v1::$name) -> Option<Self> {
                match wire {
                    v1::$name::Unspecified => None,
                    $(v1::$name::$word => Some(Self::$word),)+
                }
            }
        }
    )+};
}

words! {
    ApprovalKind { NetworkProxy, NetworkHost, EgressHost, Isolation, FileRead }
    ApprovalReach { File, Directory }
    ApprovalScope { Once, Session, User, Project, Tenant }
    ApprovalState { Pending, Allowed, Denied, Expired }
    FlagAction { Set, Rollback, Guard }
    OutputStream { Stdout, Stderr }
    RunState { Queued, Running, Ended }
    Scope { Run, Files, Approve, Audit, Admin, Operator }
    SessionEndReason { Closed, Expired, Idle, DataLost }
    SessionState { Open, Ended }
    WorkerState { Ready, Draining, Gone }
}

/// The number of a word in a message, which may lack it.
pub(crate) fn number_or_unspecified(word: Option<impl Word>) -> i32 {
    word.map_or(0, Word::number)
}

/// Reads the word of a request; `None` if it has none.
pub(crate) fn parse<W: Word>(field: &str, number: i32) -> Result<Option<W>, ApiError> {
    enum_value::<W::Wire>(field, number).map(W::from_wire)
}
