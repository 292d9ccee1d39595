//! Ids in tables and at the end of resource names.

use std::collections::BTreeSet;

/// Lengths of ids in tables: time and counter, some random digits more, all.
const LENGTHS: [usize; 3] = [18, 23, 36];

/// Returns the ids as tables show them: shortened, but so that all of them differ.
pub(crate) fn short<'a>(ids: impl Iterator<Item = &'a str>) -> impl Fn(&str) -> String {
    let ids: BTreeSet<&str> = ids.collect();
    let cut = |id: &str, length: usize| id.get(..length).unwrap_or(id).to_owned();
    let differ = |length: &usize| {
        ids.iter().map(|id| cut(id, *length)).collect::<BTreeSet<_>>().len() == ids.len()
    };
    let length = LENGTHS.into_iter().find(differ).unwrap_or(usize::MAX);
    move |id| cut(id, length)
}

/// Returns the id at the end of a resource name.
pub(crate) fn last_segment(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_ids_differ() {
        let ids = ["01a1dd8f-750d-7375-8ae9-f58c8f946986", "01a1dd8f-750d-7375-9ae9-f58c8f946986"];
        assert_eq!(short(ids[..1].iter().copied())(ids[0]), "01a1dd8f-750d-7375");
        assert_eq!(short(ids.into_iter())(ids[1]), "01a1dd8f-750d-7375-9ae9");
        assert_eq!(short(["ab"].into_iter())("ab"), "ab");
    }
}
