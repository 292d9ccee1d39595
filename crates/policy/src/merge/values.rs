//! Merges the values of one field.

use std::{collections::BTreeSet, path::PathBuf};

use crate::{PathTrie, hosts};

/// The smaller of the values that are present. `false` is less than `true`.
pub(crate) fn min<T: Ord + Copy>(upper: &Option<T>, lower: &Option<T>) -> Option<T> {
    upper.iter().chain(lower).min().copied()
}

/// The larger of the values that are present.
pub(crate) fn max<T: Ord + Copy>(upper: &Option<T>, lower: &Option<T>) -> Option<T> {
    *upper.max(lower)
}

/// The value of the upper policy, if it has one.
pub(crate) fn upper<T: Clone>(upper: &Option<T>, lower: &Option<T>) -> Option<T> {
    upper.as_ref().or(lower.as_ref()).cloned()
}

/// Nothing yet: [`Policy::merge`](crate::Policy::merge) decides about the field together with
/// others.
pub(crate) fn with_others<T: Default>(_: &T, _: &T) -> T {
    T::default()
}

/// The items that are in both lists. An absent list has every item.
pub(crate) fn equal<T: Ord + Clone>(
    upper: &Option<Vec<T>>,
    lower: &Option<Vec<T>>,
) -> Option<Vec<T>> {
    intersect(upper, lower, items)
}

/// The paths that both lists cover: theirs, and those below. An absent list covers everything.
pub(crate) fn below(
    upper: &Option<Vec<PathBuf>>,
    lower: &Option<Vec<PathBuf>>,
) -> Option<Vec<PathBuf>> {
    intersect(upper, lower, trees)
}

/// The items of both lists.
pub(crate) fn union<T: Ord + Clone>(upper: &[T], lower: &[T]) -> Vec<T> {
    sorted(upper.iter().chain(lower).cloned().collect())
}

/// The patterns of hosts of both lists, those of named sets included.
pub(crate) fn hosts(upper: &[String], lower: &[String]) -> Vec<String> {
    hosts::normalized([hosts::expand(upper), hosts::expand(lower)].concat())
}

/// Whether a list is there and not empty.
pub(crate) fn has_entries<T>(list: &Option<Vec<T>>) -> bool {
    list.as_ref().is_some_and(|list| !list.is_empty())
}

/// Whether a list covers an item. Built once for each list, so that the list is not searched for
/// each item.
pub(super) type Covers<'a, T> = Box<dyn Fn(&T) -> bool + 'a>;

/// Covers equal items.
pub(super) fn items<T: Ord>(list: &[T]) -> Covers<'_, T> {
    let items: BTreeSet<_> = list.iter().collect();
    Box::new(move |item| items.contains(item))
}

/// Covers the paths of the list and those below them.
fn trees(list: &[PathBuf]) -> Covers<'_, PathBuf> {
    let paths: PathTrie<_> = list.iter().collect();
    Box::new(move |path| paths.covers(path))
}

fn intersect<T: Ord + Clone>(
    a: &Option<Vec<T>>,
    b: &Option<Vec<T>>,
    covers: impl for<'a> Fn(&'a [T]) -> Covers<'a, T>,
) -> Option<Vec<T>> {
    let (Some(a), Some(b)) = (a, b) else {
        return a.as_ref().or(b.as_ref()).map(|list| sorted(list.clone()));
    };
    let in_a = covers(a);
    let in_b = covers(b);
    let both = a.iter().chain(b).filter(|item| in_a(item) && in_b(item));
    Some(sorted(both.cloned().collect()))
}

pub(super) fn sorted<T: Ord>(mut list: Vec<T>) -> Vec<T> {
    list.sort();
    list.dedup();
    list
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;

    proptest! {
        #[test]
        fn intersection_equals_pairwise_comparison(
            a in lists(&["/a", "/a/b", "/a/b/c", "/a-b", "/ab", "/b"]),
            b in lists(&["/a", "/a/b", "/a-b/c", "/ab", "/b"]),
        ) {
            let paths = |list: &[String]| list.iter().map(PathBuf::from).collect::<Vec<_>>();
            let (a, b) = (paths(&a), paths(&b));
            let is_below = |path: &PathBuf, upper: &PathBuf| path.starts_with(upper);
            let expected = pairwise(&a, &b, is_below);
            prop_assert_eq!(below(&Some(a), &Some(b)), Some(expected));
        }
    }

    fn lists(items: &'static [&'static str]) -> impl Strategy<Value = Vec<String>> {
        vec(select(items).prop_map(str::to_owned), 0..5)
    }

    fn pairwise<T: Ord + Clone>(a: &[T], b: &[T], is_covered: impl Fn(&T, &T) -> bool) -> Vec<T> {
        let covered = |list: &[T], item: &T| list.iter().any(|upper| is_covered(item, upper));
        sorted(
            a.iter()
                .chain(b)
                .filter(|item| covered(a, item) && covered(b, item))
                .cloned()
                .collect(),
        )
    }
}
