//! `codelia flags …`.

use anyhow::Result;
use codelia_proto::{
    duration_to_proto,
    v1::{
        Flag, FlagGuard, FlagRule, GetFlagRequest, IsolationLevel, ListFlagHistoryRequest,
        ListFlagsRequest, RollbackFlagRequest, SetFlagRequest,
    },
};

use super::policy::mode_to_proto;
use crate::{
    args::{self, SetFlag},
    client::{Client, resource_name},
    ids,
    output::Output,
    units,
    words::Word,
};

/// Executes `codelia flags`.
pub(crate) async fn flags(client: &Client, command: args::Flags, output: Output) -> Result<()> {
    let flag = match command {
        args::Flags::List => return list(client, output).await,
        args::Flags::History { flag, limit } => return history(client, &flag, limit, output).await,
        args::Flags::Show { flag } => {
            client.call(GetFlagRequest { name: flag_name(&flag) }).await?
        }
        args::Flags::Set(args) => client.call(set_request(*args)).await?,
        args::Flags::Rollback { flag, to, reason } => {
            let name = flag_name(&flag);
            client.call(RollbackFlagRequest { name, reason, revision: to }).await?
        }
    };
    output.print_message(&flag)
}

fn flag_name(flag: &str) -> String {
    resource_name("flags", flag)
}

fn set_request(args: SetFlag) -> SetFlagRequest {
    let has_guard =
        args.max_refused.is_some() || args.max_failed.is_some() || args.max_setup_p95.is_some();
    let guard = has_guard.then(|| FlagGuard {
        max_refused_percent: args.max_refused,
        max_failed_percent: args.max_failed,
        max_setup_p95: args.max_setup_p95.map(duration_to_proto),
        min_count: args.min_count,
    });
    let rule = FlagRule {
        tenant: args.tenant,
        labels: args.labels.into_iter().collect(),
        percent: Some(args.percent),
        mode: mode_to_proto(args.mode),
        floor: IsolationLevel::from(args.floor).into(),
        guard,
    };
    SetFlagRequest {
        name: flag_name(&args.flag),
        rule: Some(rule),
        reason: args.reason,
        force: args.force,
    }
}

async fn list(client: &Client, output: Output) -> Result<()> {
    let flags = client.list(ListFlagsRequest::default(), usize::MAX).await?;
    let header = ["FLAG", "MODE", "FLOOR", "SESSIONS", "SHARE", "REVISION", "CHANGED", "REASON"];
    output.print_list(&header, &flags, |flag: &Flag| {
        let rule = flag.rule.clone().unwrap_or_default();
        vec![
            flag.flag_id.clone(),
            mode(flag),
            rule.floor().to_level().map(|level| level.to_string()).unwrap_or_default(),
            if flag.rule.is_some() { sessions(&rule) } else { String::new() },
            rule.percent.map(|percent| format!("{percent} %")).unwrap_or_default(),
            flag.revision.to_string(),
            units::age(flag.create_time.as_ref()),
            flag.reason.clone(),
        ]
    })
}

/// The mode of a flag with a rule, if the rule has one.
fn mode(flag: &Flag) -> String {
    flag.rule.as_ref().map_or_else(|| "off".to_owned(), |rule| rule.mode().word())
}

/// Which sessions a rule is about.
fn sessions(rule: &FlagRule) -> String {
    let tenant = Some(rule.tenant.clone()).filter(|tenant| !tenant.is_empty());
    let mut labels: Vec<_> =
        rule.labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
    labels.sort();
    let parts: Vec<_> = tenant.into_iter().chain(labels).collect();
    if parts.is_empty() { "all".to_owned() } else { parts.join(",") }
}

async fn history(client: &Client, flag: &str, limit: usize, output: Output) -> Result<()> {
    let request = ListFlagHistoryRequest { name: flag_name(flag), ..Default::default() };
    let revisions = client.list(request, limit).await?;
    let header = [
        "REVISION", "ACTION", "MODE", "SHARE", "SESSIONS", "RUNS", "FAILED", "CHANGED", "KEY",
        "REASON",
    ];
    let key = ids::short(revisions.iter().map(|flag| flag.key_id.as_str()));
    output.print_list(&header, &revisions, |flag: &Flag| {
        let rule = flag.rule.clone().unwrap_or_default();
        let numbers = flag.numbers.unwrap_or_default();
        vec![
            flag.revision.to_string(),
            flag.action().word(),
            mode(flag),
            rule.percent.map(|percent| format!("{percent} %")).unwrap_or_default(),
            numbers.sessions.to_string(),
            numbers.runs.to_string(),
            (numbers.failed_runs + numbers.refused_runs + numbers.refused_sessions).to_string(),
            units::age(flag.create_time.as_ref()),
            key(&flag.key_id),
            flag.reason.clone(),
        ]
    })
}
