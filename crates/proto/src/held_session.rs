//! [`HeldSession`]: the lease that a call to a worker relies on, in the metadata of the call.

use std::str::FromStr;

use codelia_types::{LeaseEpoch, SessionId, TenantId};
use tonic::{Request, metadata::MetadataMap};

const SESSION: &str = "codelia-session";
const TENANT: &str = "codelia-tenant";
const EPOCH: &str = "codelia-lease-epoch";

/// A session that a worker holds. A worker that does not hold it under this epoch refuses the call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldSession {
    /// The id of the session.
    pub session: SessionId,
    /// The tenant of the session.
    pub tenant: TenantId,
    /// The epoch of the lease.
    pub epoch: LeaseEpoch,
}

impl HeldSession {
    /// A call that relies on the lease.
    pub fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let values = [
            (SESSION, self.session.to_string()),
            (TENANT, self.tenant.to_string()),
            (EPOCH, self.epoch.0.to_string()),
        ];
        for (key, value) in values {
            // All of them are ASCII. The worker refuses a call without one.
            if let Ok(value) = value.parse() {
                request.metadata_mut().insert(key, value);
            }
        }
        request
    }

    /// The lease that a call relies on; `None` if it names none.
    #[must_use]
    pub fn from_metadata(metadata: &MetadataMap) -> Option<Self> {
        let session = parse(metadata, SESSION)?;
        let tenant = parse(metadata, TENANT)?;
        Some(Self { session, tenant, epoch: LeaseEpoch(parse(metadata, EPOCH)?) })
    }
}

fn parse<T: FromStr>(metadata: &MetadataMap, key: &str) -> Option<T> {
    metadata.get(key)?.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_survives_the_metadata() {
        let held = HeldSession {
            session: SessionId::generate(),
            tenant: "a-1".parse().unwrap(),
            epoch: LeaseEpoch(7),
        };
        let mut request = held.request(());
        assert_eq!(HeldSession::from_metadata(request.metadata()), Some(held));
        request.metadata_mut().insert(EPOCH, "x".parse().unwrap());
        assert_eq!(HeldSession::from_metadata(request.metadata()), None);
        assert_eq!(HeldSession::from_metadata(&MetadataMap::new()), None);
    }
}
