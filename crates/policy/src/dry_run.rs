//! The changes that a policy would have made for a run that was admitted without it.

use crate::{
    CommandPolicy, FIELDS, Limit, LimitsRequest, Plan, Policy, PolicyError, RunSpec,
    validate::{CommandRules, fail},
};
use codelia_types::{Mode, NetworkMode};

/// A policy to try on recorded runs.
#[derive(Debug)]
pub struct DryRun {
    policy: Policy,
    /// The patterns of the last command policy, which most runs share.
    compiled: Option<(CommandPolicy, CommandRules)>,
}

/// The effect that the policy would have had on a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DryRunResult {
    /// The field that would have refused the run, and why.
    pub refused: Option<PolicyError>,
    /// The fields that would have been tighter for it. Empty if it would have been refused.
    pub changed: Vec<&'static str>,
}

impl DryRun {
    /// A dry run of a policy.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self { policy, compiled: None }
    }

    /// Tries the policy on a run: it is merged with the effective policy of the
    /// run. So the result shows what the policy takes away, and nothing that it would give.
    pub fn judge(&mut self, run: &RunSpec) -> DryRunResult {
        let merged = self.policy.merge(&run.policy);
        match self.check(run, &merged) {
            Err(error) => DryRunResult { refused: Some(error), changed: Vec::new() },
            Ok(()) => DryRunResult { refused: None, changed: changed(run, &merged) },
        }
    }

    fn check(&mut self, run: &RunSpec, merged: &Policy) -> Result<(), PolicyError> {
        if let (Some(now), Some(then)) =
            (&self.policy.container.profile, &run.policy.container.profile)
            && now != then
        {
            return fail("container.profile", format!("the run had {then:?}, not {now:?}"));
        }
        merged.network.check_size()?;
        merged.check_mode(run.mode)?;
        let network = if run.mode == Mode::Logical {
            run.network
        } else {
            run.network.map(|network| merged.network.effective_mode(Some(network)))
        };
        Plan::check(run.mode, network, merged).or_else(|error| {
            let field = error.field.strip_prefix("policy.").unwrap_or(error.field);
            fail(field, format!("cannot be enforced in mode {}", error.mode))
        })?;
        let command = &run.command;
        let names = command.env.keys().chain(&command.secret_env_names);
        if let Some(name) = merged.environment.first_refused(names) {
            return fail("environment.names", format!("the run set the variable {name}"));
        }
        check_limits(run, merged)?;
        self.check_command(&merged.command, &command.argv)
    }

    fn check_command(
        &mut self,
        policy: &CommandPolicy,
        argv: &[String],
    ) -> Result<(), PolicyError> {
        let rules = match self.compiled.take().filter(|(of, _)| of == policy) {
            Some((_, rules)) => rules,
            None => CommandRules::new(policy)?,
        };
        let checked = rules.check(argv);
        self.compiled = Some((policy.clone(), rules));
        checked
    }
}

/// The fields of a policy that would lower a limit of a run.
fn lowered(run: &RunSpec, merged: &Policy) -> Vec<&'static str> {
    let limits = LimitsRequest::from(&run.limits).amounts().zip(merged.caps().amounts());
    let lowered = limits.filter(|((_, has), (_, cap))| cap.is_some() && has > cap);
    let caps = merged.cap_fields();
    let field = |lowest| caps.iter().find(|(_, limit, cap)| (*limit, *cap) == lowest);
    lowered.filter_map(|(_, lowest)| field(lowest)).map(|(field, ..)| *field).collect()
}

/// Refuses a limit that the run or its session requested and would not have got. What a policy of
/// the run capped is in its request too, but nobody requested it.
fn check_limits(run: &RunSpec, merged: &Policy) -> Result<(), PolicyError> {
    let caps = run.policy.caps().amounts().zip(merged.caps().amounts());
    for ((limit, requested), ((_, capped), (_, cap))) in run.requested_limits.amounts().zip(caps) {
        if requested != capped && cap.is_some() && requested > cap {
            return fail(limit.field(), "the run or its session requested more");
        }
    }
    Ok(())
}

/// The fields that are tighter for a run, without those that have no effect on it.
fn changed(run: &RunSpec, merged: &Policy) -> Vec<&'static str> {
    let before = run.policy.set_fields();
    let after = merged.set_fields();
    let lowered = lowered(run, merged);
    let network = |policy: &Policy| policy.network.effective_mode(run.network);
    let has_effect = |field: &str| match field {
        // They only refuse runs.
        "isolation_level"
        | "environment.mode"
        | "environment.names"
        | "command.allowed_patterns"
        | "command.blocked_patterns"
        | "command.max_length" => false,
        "network.mode" => run.mode != Mode::Logical && network(merged) < network(&run.policy),
        field if field.starts_with("network.") => run.network == Some(NetworkMode::Proxy),
        "process.allow_fork" => merged.process.allow_fork == Some(false),
        "process.allow_exec" => merged.process.allow_exec == Some(false),
        field if is_limit(field) => lowered.contains(&field),
        _ => true,
    };
    FIELDS
        .iter()
        .map(|field| field.path)
        .filter(|field| before.get(*field) != after.get(*field) && has_effect(field))
        .collect()
}

/// Whether a field caps a limit of a run.
fn is_limit(field: &str) -> bool {
    Limit::ALL.into_iter().any(|limit| limit.caps().contains(&field))
}

#[cfg(test)]
mod tests {
    use codelia_types::CommandSpec;

    use super::*;
    use crate::Limits;

    fn parse(text: &str) -> Policy {
        Policy::parse(text, crate::Format::Yaml).unwrap()
    }

    fn run(policy: &str, argv: &[&str]) -> RunSpec {
        RunSpec {
            network: Some(NetworkMode::None),
            limits: Limits { pids: 40, ..Limits::default() },
            requested_limits: LimitsRequest { pids: Some(40), ..LimitsRequest::default() },
            policy: parse(policy).with_defaults(),
            ..RunSpec::new(CommandSpec::new(argv.iter().copied()), Mode::Bwrap)
        }
    }

    #[test]
    fn dry_run_names_the_field() {
        let run = run("command: {allowed_patterns: ['^make', '^ls']}", &["make", "test"]);
        let judge = |policy: &str| {
            let result = DryRun::new(parse(policy)).judge(&run);
            (result.refused.map(|error| error.field), result.changed)
        };
        let refused = |field: &str| (Some(field.to_owned()), Vec::new());
        assert_eq!(judge(""), (None, Vec::new()));
        assert_eq!(
            judge("command: {blocked_patterns: [test]}"),
            refused("command.blocked_patterns")
        );
        assert_eq!(
            judge("command: {allowed_patterns: ['^ls']}"),
            refused("command.allowed_patterns")
        );
        assert_eq!(judge("isolation_level: LEVEL_0"), refused("isolation_level"));
        assert_eq!(judge("process: {max_processes: 30}"), refused("limits.pids"));
        assert_eq!(judge("network: {executables: [/bin/ls]}"), refused("network.executables"));
        assert_eq!(judge("process: {allow_fork: false}"), (None, vec!["process.allow_fork"]));
        assert_eq!(
            judge("resources: {max_memory_bytes: 1024}"),
            (None, vec!["resources.max_memory_bytes"])
        );
        // Fields without an effect on this run.
        for policy in [
            "resources: {max_memory_bytes: 9999999999}",
            "process: {allow_fork: true, max_processes: 90}",
            "network: {blocked_hosts: [a.example]}",
            "command: {blocked_patterns: [rm], max_length: 100}",
        ] {
            assert_eq!(judge(policy), (None, Vec::new()), "{policy}");
        }
    }
}
