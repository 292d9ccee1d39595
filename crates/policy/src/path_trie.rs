//! Paths by their components, to find those that contain another path without comparing each.

use std::{collections::HashMap, ffi::OsStr, iter, path::Path};

/// Values by path. A lookup takes time linear in the length of the path, whatever the number of
/// values. Paths compare by component, as in [`Path::starts_with`]: `/a` contains `/a/b`, not
/// `/ab`.
#[derive(Debug)]
pub struct PathTrie<'a, V> {
    /// The node of each component, by the node of its parent.
    children: HashMap<(usize, &'a OsStr), usize>,
    /// By node. The first is that of the empty path.
    values: Vec<Option<V>>,
}

impl<V> Default for PathTrie<'_, V> {
    fn default() -> Self {
        Self { children: HashMap::new(), values: vec![None] }
    }
}

impl<'a, V> PathTrie<'a, V> {
    /// Sets the value of a path and returns the previous one.
    pub fn insert(&mut self, path: &'a Path, value: V) -> Option<V> {
        let mut node = 0;
        for part in path.components() {
            let next = self.values.len();
            node = *self.children.entry((node, part.as_os_str())).or_insert(next);
            if node == next {
                self.values.push(None);
            }
        }
        self.values[node].replace(value)
    }

    /// The values of the paths that contain `path`, itself included, outermost first.
    pub fn containing<'s>(&'s self, path: &'s Path) -> impl Iterator<Item = &'s V> {
        let nodes = path.components().scan(0, |node, part| {
            *node = *self.children.get(&(*node, part.as_os_str()))?;
            Some(*node)
        });
        iter::once(0).chain(nodes).filter_map(|node| self.values[node].as_ref())
    }

    /// Whether a path contains `path`, or is the same.
    #[must_use]
    pub fn covers(&self, path: &Path) -> bool {
        self.containing(path).next().is_some()
    }
}

impl<'a, P: AsRef<Path>> FromIterator<&'a P> for PathTrie<'a, ()> {
    fn from_iter<I: IntoIterator<Item = &'a P>>(paths: I) -> Self {
        let mut trie = Self::default();
        for path in paths {
            trie.insert(path.as_ref(), ());
        }
        trie
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;

    /// Paths with few names, so that they overlap. `a-b` sorts between `a` and `a/b` by bytes.
    fn path() -> impl Strategy<Value = PathBuf> {
        vec(select(vec!["a", "b", "a-b", "ab"]), 0..5)
            .prop_map(|names| iter::once("/").chain(names).collect())
    }

    proptest! {
        #[test]
        fn lookup_equals_pairwise_comparison(paths in vec(path(), 0..8), other in path()) {
            let mut trie = PathTrie::default();
            for (index, path) in paths.iter().enumerate() {
                trie.insert(path, index);
            }
            let containing = |path: &&PathBuf| other.starts_with(path);
            prop_assert_eq!(trie.covers(&other), paths.iter().any(|path| other.starts_with(path)));
            let mut expected: Vec<_> = paths.iter().filter(containing).collect();
            expected.sort();
            expected.dedup();
            let last = |path: &PathBuf| paths.iter().rposition(|found| found == path).unwrap();
            let expected: Vec<_> = expected.into_iter().map(last).collect();
            prop_assert_eq!(trie.containing(&other).copied().collect::<Vec<_>>(), expected);
        }
    }
}
