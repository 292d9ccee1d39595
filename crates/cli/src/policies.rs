//! `codelia policy …`, and policies from files.

use std::path::Path;

use anyhow::{Context, Result};
use codelia_policy::{FilesystemMode, Format, Policy, PolicyError};
use codelia_proto::v1::{
    self, CheckPolicyRequest, ExplainPolicyRequest, ExplainPolicyResponse, PolicySource, SandboxMode,
};
use codelia_types::Mode;
use serde_json::{Value, json};

use crate::{
    args,
    client::{Client, session_name},
    output::{Output, table},
    record,
};

/// Does what the command says.
pub(crate) async fn policy(client: &Client, command: args::PolicyCommand, output: Output) -> Result<()> {
    match command {
        args::PolicyCommand::Check { file, mode } => check(client, &file, mode, output).await,
        args::PolicyCommand::Explain { session, policy, mode } => {
            let request = ExplainPolicyRequest {
                session: session.map(|given| session_name(&given)).unwrap_or_default(),
                policy: load(policy.as_deref())?,
                mode: wire_mode(mode),
            };
            let explained = client.policies().explain_policy(request).await?.into_inner();
            output.one(&explanation(&explained)?, &for_people(&explained))
        }
    }
}

/// Reads a policy from a file, in the format that its extension names.
pub(crate) fn read(file: &Path) -> Result<Policy> {
    let name = || file.display().to_string();
    let format = Format::of(file).with_context(name)?;
    let text = std::fs::read_to_string(file).with_context(name)?;
    Policy::parse(&text, format).with_context(name)
}

/// Reads a policy from a file, if there is one, for the wire.
pub(crate) fn load(file: Option<&Path>) -> Result<Option<v1::Policy>> {
    file.map(|file| read(file).map(|policy| (&policy).into())).transpose()
}

/// The policy of a run or session as it was asked for: a file, and what flags add to it.
pub(crate) fn asked(args: &args::Policy) -> Result<Option<v1::Policy>> {
    let policy = args.file.as_deref().map(read).transpose()?;
    let mut whole = policy.clone().unwrap_or_default();
    add(&mut whole, &args.files);
    Ok((policy.is_some() || whole != Policy::default()).then(|| (&whole).into()))
}

fn add(policy: &mut Policy, flags: &args::Files) {
    let files = &mut policy.filesystem;
    if flags.is_static {
        files.mode = Some(FilesystemMode::Static);
    }
    let lists = [
        (&mut files.read_only_paths, &flags.ro),
        (&mut files.read_write_paths, &flags.rw),
        (&mut files.overlay_paths, &flags.overlay),
    ];
    for (list, more) in lists.into_iter().filter(|(_, more)| !more.is_empty()) {
        list.get_or_insert_default().extend(more.iter().cloned());
    }
    files.denied_paths.extend(flags.deny.iter().cloned());
    if flags.image_profile.is_some() {
        policy.container.profile.clone_from(&flags.image_profile);
    }
}

async fn check(client: &Client, file: &Path, mode: Option<Mode>, output: Output) -> Result<()> {
    let request = CheckPolicyRequest { policy: load(Some(file))?, mode: wire_mode(mode) };
    let checked = client.policies().check_policy(request).await?.into_inner();
    let policy = from_wire(checked.policy)?;
    output.one(&serde_json::to_value(&policy)?, policy.write(Format::Yaml)?.trim_end())
}

fn wire_mode(mode: Option<Mode>) -> i32 {
    mode.map_or(SandboxMode::Unspecified, SandboxMode::from).into()
}

fn from_wire(policy: Option<v1::Policy>) -> Result<Policy, PolicyError> {
    Policy::try_from(policy.unwrap_or_default())
}

fn explanation(explained: &ExplainPolicyResponse) -> Result<Value> {
    let fields = explained
        .fields
        .iter()
        .map(|field| json!({ "field": field.field, "value": field.value, "source": source(field.source()) }));
    Ok(json!({
        "mode": record::mode(explained.mode()),
        "policy": from_wire(explained.policy.clone())?,
        "limits": explained.limits.as_ref().map(record::limits),
        "fields": fields.collect::<Vec<_>>(),
        "mounts": explained.mounts,
    }))
}

fn for_people(explained: &ExplainPolicyResponse) -> String {
    let fields = explained
        .fields
        .iter()
        .map(|field| vec![field.field.clone(), field.value.clone(), source(field.source()).to_owned()]);
    let limits = explained.limits.as_ref().map(record::limits).unwrap_or_default();
    let limits = limits.as_object().into_iter().flatten();
    let limits = limits.map(|(name, value)| vec![name.clone(), value.to_string()]);
    let mounts = explained.mounts.iter().map(|mount| {
        let (target, how) = mount.split_once(' ').unwrap_or((mount, ""));
        vec![target.to_owned(), how.to_owned()]
    });
    let parts = [
        format!("mode {}", record::mode(explained.mode()).unwrap_or_default()),
        table(&["FIELD", "VALUE", "DECIDED BY"], fields),
        table(&["LIMIT", "VALUE"], limits),
        table(&["MOUNT", "HOW"], mounts),
    ];
    let shown = parts.len() - usize::from(explained.mounts.is_empty());
    parts[..shown].join("\n\n")
}

fn source(source: PolicySource) -> &'static str {
    match source {
        PolicySource::Unspecified => "",
        PolicySource::Default => "default",
        PolicySource::Session => "session",
        PolicySource::Run => "run",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_add_to_a_policy() {
        let mut policy = Policy::default();
        add(&mut policy, &args::Files::default());
        assert_eq!(policy, Policy::default());
        policy.filesystem.overlay_paths = Some(vec!["/a".into()]);
        let flags = args::Files {
            is_static: true,
            ro: vec!["/r".into()],
            overlay: vec!["/b".into()],
            deny: vec!["/r/d".into()],
            image_profile: Some("python".to_owned()),
            ..Default::default()
        };
        add(&mut policy, &flags);
        let text =
            "filesystem: {mode: static, read_only_paths: [/r], overlay_paths: [/a, /b], denied_paths: [/r/d]}
container: {profile: python}";
        assert_eq!(policy, Policy::parse(text, Format::Yaml).unwrap());
    }
}
