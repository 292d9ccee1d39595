//! What a kind of sandbox is known not to do, each with its reason. What is not here must hold, and what
//! is here must be so: an exception that is needless fails the suite.

use crate::harness::Kind;

/// Attacks that are seen to get through, in the order of the suite.
const ATTACKS: [(Kind, &str, &str); 2] = [
    (Kind::Runc, "see homes", "the image has an empty /home of its own"),
    (
        Kind::Runc,
        "have a set-user-id program of the host",
        "the programs are the image's and no engine mounts an image nosuid: no_new_privs makes the bit void",
    ),
];

/// The attacks that this kind lets through.
pub(crate) fn attacks(kind: Kind) -> Vec<&'static str> {
    ATTACKS.iter().filter(|(of, ..)| *of == kind).map(|(_, name, _)| *name).collect()
}
