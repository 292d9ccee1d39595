//! Decodes the errors that workers report for file calls.

use codelia_proto::internal::v1::FileRefusal;
use prost::Message;
use tonic::Status;

use crate::status::FileError;

/// The error in a worker's status; `None` if it is not from the worker but from the transport.
pub(super) fn from_status(status: &Status) -> Option<FileError> {
    FileRefusal::decode(status.details()).ok().and_then(FileError::from_worker)
}

#[cfg(test)]
mod tests {
    use codelia_proto::internal::v1::FileRefusalReason;
    use tonic::Code;

    use super::*;

    #[test]
    fn only_statuses_with_a_cause_are_file_errors() {
        let refusal = FileRefusal {
            reason: FileRefusalReason::NotHeld.into(),
            field: "path".into(),
            ..Default::default()
        };
        let with_details = |refusal: FileRefusal| {
            Status::with_details(Code::FailedPrecondition, "refused", refusal.encode_to_vec().into())
        };
        let error = from_status(&with_details(refusal)).unwrap();
        assert!(error.is_not_held() && error.field == "path");
        assert_eq!(from_status(&with_details(FileRefusal::default())), None);
        assert_eq!(from_status(&Status::unavailable("broken")), None);
    }
}
