//! What distinguishes requests with the same idempotency key.

use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::error::ApiError;

/// A hash of a request. Stable, because maps are ordered.
pub(crate) fn fingerprint(request: &impl Serialize) -> Result<[u8; 32], ApiError> {
    let bytes = serde_json::to_vec(request).map_err(ApiError::internal)?;
    Ok(Sha256::digest(bytes).into())
}
