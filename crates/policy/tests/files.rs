//! Properties of file calls: a policy allows them exactly what the mounts of a plan allow a
//! command, and a lower policy never allows what a higher one denies.

#![allow(clippy::unwrap_used, reason = "test code")]

use std::path::{Path, PathBuf};

use codelia_policy::{
    Ceilings, FileAccess, FilesystemPolicy, Format, HostInfo, Ids, Mount, Plan, PlanTarget, Policy,
    RunSpec,
};
use codelia_types::{CommandSpec, Mode, RunId, SessionId};
use proptest::{collection::vec, option::of, prelude::*, sample::select};

/// Paths in the workspace with few names and depths, so that they overlap.
fn path() -> impl Strategy<Value = PathBuf> {
    vec(select(vec!["a", "b", "ab"]), 0..4).prop_map(|names| {
        [Path::new("/workspace")].into_iter().chain(names.iter().map(Path::new)).collect()
    })
}

fn filesystem() -> impl Strategy<Value = FilesystemPolicy> {
    (of(vec(path(), 0..3)), of(vec(path(), 0..3)), vec(path(), 0..3)).prop_map(
        |(read_only_paths, read_write_paths, denied_paths)| FilesystemPolicy {
            read_only_paths,
            read_write_paths,
            denied_paths,
            ..FilesystemPolicy::default()
        },
    )
}

/// The plan for the policy. `None` if no plan can be made.
fn plan(filesystem: &FilesystemPolicy) -> Option<Plan> {
    let policy = Policy { filesystem: filesystem.clone(), ..Policy::default() };
    let command = CommandSpec::new(["true"]);
    let spec = RunSpec { policy, ..RunSpec::new(command, Mode::Bwrap) };
    let ids = Ids { uid: 1, gid: 1 };
    let target = PlanTarget {
        sandbox: RunId::generate(),
        session: SessionId::generate(),
        root: "/session".into(),
    };
    Plan::isolated(target, &spec, &HostInfo::fully_capable(), ids).ok()
}

/// Whether a command can read and write the path. The last mount decides.
fn command_may(plan: &Plan, path: &Path) -> (bool, bool) {
    match plan.mounts.iter().rev().find(|mount| path.starts_with(mount.target())).unwrap() {
        Mount::Bind { writable, .. } => (true, *writable),
        _ => (false, false),
    }
}

/// The policies in `examples` are valid, and enforceable in an isolating mode.
#[test]
fn example_policies_are_valid() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/policies");
    let mut count = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let policy = Policy::parse(&text, Format::from_path(&path).unwrap()).unwrap();
        assert_eq!(policy.validate(&Ceilings::default()), Ok(()), "{path:?}");
        assert_eq!(Plan::check(Mode::Bwrap, None, &policy), Ok(()), "{path:?}");
        count += 1;
    }
    assert!(count > 0);
}

proptest! {
    #[test]
    fn file_calls_match_command_mounts(policy in filesystem(), path in path()) {
        let may = |what| policy.check_file(what, &path).is_ok();
        let Some(plan) = plan(&policy) else { return Ok(()) };
        prop_assert_eq!((may(FileAccess::Read), may(FileAccess::Write)), command_may(&plan, &path));
    }

    #[test]
    fn parent_of_unwritable_path_cannot_be_replaced(
        policy in filesystem(), path in path(), below in path()
    ) {
        let Some(plan) = plan(&policy) else { return Ok(()) };
        let (_, writable) = command_may(&plan, &below);
        if !writable && below.starts_with(&path) {
            prop_assert!(policy.check_file(FileAccess::Replace, &path).is_err());
        }
    }

    #[test]
    fn denied_above_stays_denied_below(upper in filesystem(), lower in filesystem(), path in path()) {
        let whole = |filesystem: &FilesystemPolicy| Policy { filesystem: filesystem.clone(), ..Policy::default() };
        let merged = whole(&upper).merge(&whole(&lower)).filesystem;
        if upper.check_file(FileAccess::Read, &path).is_err() {
            prop_assert!(merged.check_file(FileAccess::Read, &path).is_err());
        }
    }

    #[test]
    fn paths_outside_workspace_are_denied(policy in filesystem(), path in "/[a-z/.]{0,20}") {
        prop_assume!(!path.starts_with("/workspace"));
        prop_assert!(policy.check_file(FileAccess::Read, Path::new(&path)).is_err());
    }
}
