//! The watched directories: which watch descriptor stands for which path. A renamed directory
//! changes one entry, however much is in it. Pure.

use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    path::PathBuf,
};

/// A watch descriptor of inotify.
pub(super) type Descriptor = i32;

/// Watched directories, as far as events have shown them.
#[derive(Debug)]
pub(super) struct Tree {
    top: Descriptor,
    nodes: HashMap<Descriptor, Node>,
    max_depth: usize,
}

#[derive(Debug)]
struct Node {
    /// The directory above and the name in it; `None` for the top.
    place: Option<(Descriptor, OsString)>,
    children: HashMap<OsString, Descriptor>,
}

impl Tree {
    /// A tree with the top alone. Paths deeper than `max_depth` have no place in it.
    pub(super) fn new(top: Descriptor, max_depth: usize) -> Self {
        let node = Node { place: None, children: HashMap::new() };
        Self { top, nodes: HashMap::from([(top, node)]), max_depth }
    }

    pub(super) fn top(&self) -> Descriptor {
        self.top
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn contains(&self, directory: Descriptor) -> bool {
        self.nodes.contains_key(&directory)
    }

    /// The path of a directory from the top; `None` if it is not watched, or too deep.
    pub(super) fn path(&self, directory: Descriptor) -> Option<PathBuf> {
        let mut names = Vec::new();
        let mut node = self.nodes.get(&directory)?;
        // Events about moves that overtook each other may leave a cycle until the next ones.
        while let Some((above, name)) = &node.place {
            names.push(name);
            node = self.nodes.get(above).filter(|_| names.len() <= self.max_depth)?;
        }
        Some(names.into_iter().rev().collect())
    }

    /// The directory with this name in another one.
    pub(super) fn child(&self, directory: Descriptor, name: &OsStr) -> Option<Descriptor> {
        self.nodes.get(&directory)?.children.get(name).copied()
    }

    /// Gives a directory its place: a new one, or one that was moved.
    pub(super) fn place(&mut self, directory: Descriptor, above: Descriptor, name: &OsStr) {
        if directory == self.top || !self.contains(above) {
            return;
        }
        self.leave_place(directory);
        let node =
            self.nodes.entry(directory).or_insert(Node { place: None, children: HashMap::new() });
        node.place = Some((above, name.to_owned()));
        if let Some(above) = self.nodes.get_mut(&above) {
            above.children.insert(name.to_owned(), directory);
        }
    }

    /// Removes a directory with everything in it. Returns their descriptors.
    pub(super) fn remove(&mut self, directory: Descriptor) -> Vec<Descriptor> {
        self.leave_place(directory);
        let mut open = vec![directory];
        let mut removed = Vec::new();
        while let Some(next) = open.pop() {
            if let Some(node) = self.nodes.remove(&next) {
                removed.push(next);
                open.extend(node.children.into_values());
            }
        }
        removed
    }

    /// Removes a directory from the one above it, unless another one has its name by now.
    fn leave_place(&mut self, directory: Descriptor) {
        let place = self.nodes.get(&directory).and_then(|node| node.place.clone());
        if let Some((above, name)) = place
            && let Some(above) = self.nodes.get_mut(&above)
            && above.children.get(&name) == Some(&directory)
        {
            above.children.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Tree {
        let mut tree = Tree::new(1, 5);
        for (directory, above, name) in [(2, 1, "a"), (3, 2, "b"), (4, 1, "c")] {
            tree.place(directory, above, OsStr::new(name));
        }
        tree
    }

    #[test]
    fn moved_directory_takes_its_content_along() {
        let mut tree = tree();
        assert_eq!(tree.path(3), Some("a/b".into()));
        tree.place(2, 4, OsStr::new("new"));
        assert_eq!(tree.path(3), Some("c/new/b".into()));
        assert_eq!(tree.child(1, OsStr::new("a")), None);
        let mut removed = tree.remove(4);
        removed.sort_unstable();
        assert_eq!((removed, tree.len()), (vec![2, 3, 4], 1));
    }

    #[test]
    fn exchanged_directories_keep_their_descriptors() {
        let mut tree = tree();
        tree.place(2, 1, OsStr::new("c"));
        tree.place(4, 1, OsStr::new("a"));
        assert_eq!((tree.path(2), tree.path(4)), (Some("c".into()), Some("a".into())));
        assert_eq!(tree.child(1, OsStr::new("c")), Some(2));
        tree.remove(4);
        assert_eq!(tree.child(1, OsStr::new("c")), Some(2));
    }

    #[test]
    fn cycles_and_deep_paths_have_no_path() {
        let mut tree = tree();
        tree.place(2, 3, OsStr::new("loop"));
        assert_eq!((tree.path(2), tree.path(3)), (None, None));
        let mut removed = tree.remove(2);
        removed.sort_unstable();
        assert_eq!(removed, [2, 3]);
        for depth in 0..10 {
            tree.place(10 + depth, if depth == 0 { 1 } else { 9 + depth }, OsStr::new("d"));
        }
        assert_eq!(tree.path(14), Some("d/d/d/d/d".into()));
        assert_eq!(tree.path(15), None);
    }
}
