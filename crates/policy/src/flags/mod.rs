//! Mode flags: rules of operators that choose the mode of new sessions or raise their floor, and
//! how several rules combine.

mod guard;

use std::{cmp::Reverse, collections::BTreeMap};

use codelia_types::{FlagId, Mode, SessionId, TenantId};
use serde::{Deserialize, Serialize};

pub use guard::{FlagGuard, FlagNumbers, SETUP_BUCKETS};

use crate::IsolationLevel;

/// A rule for new sessions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlagRule {
    /// Sessions of this tenant; of all tenants if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<TenantId>,
    /// Sessions that have all these labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The share of these sessions, from 1 to 100.
    pub percent: u8,
    /// Their mode, unless the caller requests one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// The lowest isolation that they may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor: Option<IsolationLevel>,
    /// When the rule rolls itself back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guard: Option<FlagGuard>,
}

/// One revision of a flag.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FlagRef {
    /// The id of the flag.
    pub id: FlagId,
    /// The revision, which rises with each change of the rule.
    pub revision: i64,
}

/// Decisions of flags about a session. Its runs keep them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionFlags {
    /// The flag that chose its mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<FlagRef>,
    /// The floor that flags set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor: Option<IsolationLevel>,
}

impl SessionFlags {
    /// Whether no flag decided anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The facts about a new session that flags decide by.
#[derive(Debug, Clone, Copy)]
pub struct FlagSubject<'a> {
    /// The id, which decides whether the session is in a share.
    pub session: SessionId,
    /// The tenant of the session.
    pub tenant: &'a TenantId,
    /// The labels that rules select sessions by.
    pub labels: &'a BTreeMap<String, String>,
}

/// Decisions of flags about a new session.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlagChoice {
    /// The mode, if the caller requests none, and the flag that chose it.
    pub mode: Option<(Mode, FlagRef)>,
    /// The floor, and the flag that set it.
    pub floor: Option<(IsolationLevel, FlagRef)>,
}

/// The rules that are in force, the most specific first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flags(Vec<(FlagRef, FlagRule)>);

impl Flags {
    /// Orders the rules: those with more labels first, then those of one tenant, then those for a
    /// smaller share, then by id.
    #[must_use]
    pub fn new(mut rules: Vec<(FlagRef, FlagRule)>) -> Self {
        rules.sort_by(|a, b| rank(a).cmp(&rank(b)));
        Self(rules)
    }

    /// Decides about a new session. The floor is the highest of all rules that match. The mode is
    /// that of the first rule that matches and whose mode reaches `tenant_floor` and the floor.
    #[must_use]
    pub fn choose(&self, subject: FlagSubject<'_>, tenant_floor: IsolationLevel) -> FlagChoice {
        let matching = || self.0.iter().filter(|(flag, rule)| rule.matches(&flag.id, subject));
        let floor = matching()
            .filter_map(|(flag, rule)| Some((rule.floor?, flag)))
            .reduce(|highest, next| if next.0 > highest.0 { next } else { highest });
        let least = floor.as_ref().map_or(tenant_floor, |(floor, _)| tenant_floor.max(*floor));
        let mode = matching()
            .filter_map(|(flag, rule)| Some((rule.mode?, flag)))
            .find(|(mode, _)| IsolationLevel::from_mode(*mode) >= least);
        FlagChoice {
            mode: mode.map(|(mode, flag)| (mode, flag.clone())),
            floor: floor.map(|(floor, flag)| (floor, flag.clone())),
        }
    }

    /// The rules, the most specific first.
    pub fn iter(&self) -> impl Iterator<Item = &(FlagRef, FlagRule)> {
        self.0.iter()
    }
}

fn rank((flag, rule): &(FlagRef, FlagRule)) -> (Reverse<usize>, bool, u8, &FlagId) {
    (Reverse(rule.labels.len()), rule.tenant.is_none(), rule.percent, &flag.id)
}

impl FlagRule {
    /// Whether the rule is about a session. The same session always gets the same answer, and one
    /// that is in a share is also in every larger share of the same flag.
    fn matches(&self, id: &FlagId, subject: FlagSubject<'_>) -> bool {
        self.tenant.as_ref().is_none_or(|tenant| tenant == subject.tenant)
            && self.labels.iter().all(|(name, value)| subject.labels.get(name) == Some(value))
            && bucket(id, subject.session) < self.percent
    }
}

/// A number below 100 for a session, evenly distributed and independent for each flag.
fn bucket(id: &FlagId, session: SessionId) -> u8 {
    // FNV-1a: the same in every version and on every machine.
    let bytes = id.as_str().bytes().chain(*session.0.as_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    // The low bits alone mix too little: fold the high ones in.
    let mixed = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    u8::try_from((mixed ^ (mixed >> 33)) % 100).unwrap_or(0)
}

#[cfg(test)]
mod tests;
