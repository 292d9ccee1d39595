//! `codelia policy import|export|diff|history|rollback|delete|dry-run`: the stored policies of
//! scopes.

use std::{collections::BTreeMap, path::Path, time::Duration};

use anyhow::{Context, Result};
use codelia_policy::{Format, Policy, PolicyScope};
use codelia_proto::{
    duration_to_proto,
    v1::{
        self, DeleteScopePolicyRequest, DryRunResult, DryRunScopePolicyRequest, DryRunVerdict,
        GetScopePolicyRequest, ListProjectsRequest, ListScopePolicyVersionsRequest,
        RollbackScopePolicyRequest, ScopePolicy, SetScopePolicyRequest,
    },
};
use serde_json::{Value, json};

use super::policy::policy_from_proto;
use crate::{
    args::{self, ScopeArgs},
    client::Client,
    ids,
    output::{Output, json_array, table},
    policy_file::read,
    units,
    words::Word,
};

/// Executes the commands about stored policies.
pub(super) async fn stored(client: &Client, command: args::Policy, output: Output) -> Result<()> {
    let changed = match command {
        args::Policy::Import { file, of, reason, expect_version } => {
            let request = SetScopePolicyRequest {
                scope: scope(&of),
                name: of.name,
                policy: Some((&read(&file)?).into()),
                reason,
                expected_version: expect_version,
            };
            client.call(request).await?
        }
        args::Policy::Rollback { of, version, reason } => {
            let request =
                RollbackScopePolicyRequest { scope: scope(&of), name: of.name, version, reason };
            client.call(request).await?
        }
        args::Policy::Delete { of, reason } => {
            let request = DeleteScopePolicyRequest {
                scope: scope(&of),
                name: of.name,
                reason,
                expected_version: None,
            };
            client.call(request).await?
        }
        args::Policy::Export { of, version, format } => {
            return export(client, of, version.unwrap_or_default(), format, output).await;
        }
        args::Policy::Diff { file, of, version } => {
            return diff(client, of, file.as_deref(), version.unwrap_or_default(), output).await;
        }
        args::Policy::History { of, limit } => return history(client, of, limit, output).await,
        args::Policy::DryRun { file, of, since, limit } => {
            return dry_run(client, of, &read(&file)?, since, limit, output).await;
        }
        // `policy.rs` has the others.
        args::Policy::Check { .. } | args::Policy::Explain { .. } | args::Policy::Sets => {
            return Ok(());
        }
    };
    let what = if changed.deleted { "deleted as" } else { "is" };
    let text = format!(
        "policy of {} {} {what} version {}",
        changed.scope().word(),
        changed.name,
        changed.version
    );
    output.print_message_as(&changed, &text)
}

/// Lists the projects, which are names that have a policy.
pub(crate) async fn projects(client: &Client, limit: usize, output: Output) -> Result<()> {
    let projects = client.list(ListProjectsRequest::default(), limit).await?;
    output.print_list(&["PROJECT", "VERSION", "WHEN", "REASON"], &projects, |project| {
        let when = units::age(project.set_time.as_ref());
        vec![project.name.clone(), project.version.to_string(), when, project.reason.clone()]
    })
}

fn scope(of: &ScopeArgs) -> i32 {
    match of.scope {
        PolicyScope::Organisation => v1::PolicyScope::Organisation,
        PolicyScope::Project => v1::PolicyScope::Project,
        PolicyScope::User => v1::PolicyScope::User,
    }
    .into()
}

async fn get(client: &Client, of: &ScopeArgs, version: i64) -> Result<ScopePolicy> {
    client.call(GetScopePolicyRequest { scope: scope(of), name: of.name.clone(), version }).await
}

async fn export(
    client: &Client,
    of: ScopeArgs,
    version: i64,
    format: Format,
    output: Output,
) -> Result<()> {
    let found = get(client, &of, version).await?;
    let policy = found
        .policy
        .clone()
        .with_context(|| format!("{} {} has no policy", found.scope().word(), found.name))?;
    let text = policy_from_proto(Some(policy))?.write(format)?;
    output.print_message_as(&found, text.trim_end())
}

async fn diff(
    client: &Client,
    of: ScopeArgs,
    file: Option<&Path>,
    version: i64,
    output: Output,
) -> Result<()> {
    let present = policy_from_proto(get(client, &of, 0).await?.policy)?;
    let (other, header) = match file {
        Some(file) => (read(file)?, ["FIELD", "PRESENT", "FILE"]),
        None => (
            policy_from_proto(get(client, &of, version).await?.policy)?,
            ["FIELD", "PRESENT", "VERSION"],
        ),
    };
    let changes = differences(&present, &other);
    if changes.is_empty() && !output.is_json() {
        return output.print(&Value::Null, "no difference");
    }
    let json = |(field, present, other): &Change| json!({ "field": field, "present": present, "other": other });
    let text =
        |value: &Option<Value>| value.as_ref().map_or_else(|| "-".to_owned(), Value::to_string);
    output.print_whole_list(&header, &changes, json, |(field, present, other)| {
        vec![field.clone(), text(present), text(other)]
    })
}

/// A field with its values in two policies.
type Change = (String, Option<Value>, Option<Value>);

fn differences(present: &Policy, other: &Policy) -> Vec<Change> {
    let fields = |policy: &Policy| -> BTreeMap<String, Value> {
        let mut fields = policy.set_fields();
        if !policy.delegate.is_empty() {
            fields.insert("delegate".to_owned(), json!(policy.delegate));
        }
        fields
    };
    let present = fields(present);
    let other = fields(other);
    let names: std::collections::BTreeSet<_> = present.keys().chain(other.keys()).collect();
    let change =
        |name: &String| (name.clone(), present.get(name).cloned(), other.get(name).cloned());
    names.into_iter().map(change).filter(|(_, present, other)| present != other).collect()
}

async fn history(client: &Client, of: ScopeArgs, limit: usize, output: Output) -> Result<()> {
    let scope = scope(&of);
    let request = ListScopePolicyVersionsRequest { scope, name: of.name, ..Default::default() };
    let versions = client.list(request, limit).await?;
    let key = ids::short(versions.iter().map(|version| version.key_id.as_str()));
    output.print_list(
        &["VERSION", "CHANGE", "SET", "KEY", "REASON"],
        &versions,
        |version: &ScopePolicy| {
            vec![
                version.version.to_string(),
                if version.deleted { "deleted" } else { "set" }.to_owned(),
                units::age(version.set_time.as_ref()),
                key(&version.key_id),
                version.reason.clone(),
            ]
        },
    )
}

async fn dry_run(
    client: &Client,
    of: ScopeArgs,
    policy: &Policy,
    since: Duration,
    limit: usize,
    output: Output,
) -> Result<()> {
    let request = DryRunScopePolicyRequest {
        scope: scope(&of),
        name: of.name,
        policy: Some(policy.into()),
        since: Some(duration_to_proto(since)),
        ..Default::default()
    };
    let results = client.list(request, limit).await?;
    let count = |verdict| results.iter().filter(|result| result.verdict() == verdict).count();
    let refused = count(DryRunVerdict::Refused);
    let changed = count(DryRunVerdict::Changed);
    let affected: Vec<_> =
        results.iter().filter(|result| result.verdict() != DryRunVerdict::Unchanged).collect();
    let json = json!({
        "runs": results.len(),
        "refused": refused,
        "changed": changed,
        "fields": by_field(&affected),
        "affected": json_array(affected.iter().copied())?,
    });
    let summary = format!("{} runs: {refused} refused, {changed} changed", results.len());
    if affected.is_empty() {
        return output.print(&json, &summary);
    }
    let rows = by_field(&affected).into_iter().map(|(field, [refused, changed])| {
        vec![field.to_owned(), refused.to_string(), changed.to_string()]
    });
    let fields = table(&["FIELD", "REFUSED", "CHANGED"], rows);
    let runs = affected.iter().map(|result| {
        let run = result.run.rsplit('/').next().unwrap_or_default().to_owned();
        let why =
            if result.message.is_empty() { String::new() } else { format!(": {}", result.message) };
        vec![
            run,
            units::age(result.create_time.as_ref()),
            result.verdict().word(),
            format!("{}{why}", result.fields.join(", ")),
        ]
    });
    let runs = table(&["RUN", "CREATED", "WOULD BE", "BY"], runs);
    output.print(&json, &format!("{summary}\n\n{fields}\n\n{runs}"))
}

/// How many runs each field refuses and changes.
fn by_field<'a>(results: &[&'a DryRunResult]) -> BTreeMap<&'a str, [usize; 2]> {
    let mut fields = BTreeMap::new();
    for result in results {
        let at = usize::from(result.verdict() == DryRunVerdict::Changed);
        for field in &result.fields {
            fields.entry(field.as_str()).or_insert([0; 2])[at] += 1;
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_names_fields_of_either() {
        let parse = |text: &str| Policy::parse(text, Format::Yaml).unwrap();
        let present = parse("process: {allow_fork: false, max_processes: 3}");
        let other =
            parse("process: {allow_fork: true, max_processes: 3}\ndelegate: [process.debug]");
        let changes = differences(&present, &other);
        let names: Vec<_> = changes.iter().map(|(field, _, _)| field.as_str()).collect();
        assert_eq!(names, ["delegate", "process.allow_fork"]);
        assert_eq!(
            changes[1],
            ("process.allow_fork".into(), Some(json!(false)), Some(json!(true)))
        );
        assert!(differences(&present, &present).is_empty());
    }
}
