//! `codelia policy …`, and reading policy files.

use std::path::Path;

use anyhow::{Context, Result};
use codelia_policy::{FilesystemMode, Format, HOST_SETS, HostSet, Policy, PolicyError};
use codelia_proto::{
    json::to_dynamic,
    v1::{self, CheckPolicyRequest, ExplainPolicyRequest, ExplainPolicyResponse, SandboxMode},
};
use codelia_types::Mode;
use serde_json::json;

use super::policy_scopes;
use crate::{
    args,
    client::Client,
    fields,
    output::{Output, table},
    policy_file::read,
    resolve,
    words::Word,
};

/// Executes `codelia policy`.
pub(crate) async fn policy(client: &Client, command: args::Policy, output: Output) -> Result<()> {
    match command {
        args::Policy::Check { file, mode } => check(client, &file, mode, output).await,
        args::Policy::Explain { session, policy, mode, project, profile } => {
            let session = match &session {
                Some(session) => resolve::session(client, session).await?,
                None => String::new(),
            };
            let request = ExplainPolicyRequest {
                session,
                policy: load(policy.as_deref())?,
                mode: mode_to_proto(mode),
                project: project.unwrap_or_default(),
                profile: profile.unwrap_or_default(),
            };
            let explained = client.policies().explain_policy(request).await?.into_inner();
            output.print_message_as(&explained, &to_text(&explained)?)
        }
        args::Policy::Sets => sets(output),
        stored => policy_scopes::stored(client, stored, output).await,
    }
}

/// Lists the named sets of hosts. Needs no server.
pub(crate) fn sets(output: Output) -> Result<()> {
    let hosts = |set: &HostSet| set.hosts().collect::<Vec<_>>();
    output.print_whole_list(
        &["SET", "PURPOSE", "HOSTS"],
        HOST_SETS,
        |set| json!({ "set": set.name, "purpose": set.purpose, "hosts": hosts(set) }),
        |set| vec![format!("set:{}", set.name), set.purpose.to_owned(), hosts(set).join(" ")],
    )
}

/// Reads a policy file, if given, into its protobuf message.
fn load(file: Option<&Path>) -> Result<Option<v1::Policy>> {
    file.map(|file| read(file).map(|policy| (&policy).into())).transpose()
}

/// Returns the policy that a run or session requests: its file, plus the flags.
pub(crate) fn requested(args: &args::SandboxArgs) -> Result<Option<v1::Policy>> {
    refuse_nested(args)?;
    let file = args.policy_file.as_deref().map(read).transpose()?;
    let mut policy = file.clone().unwrap_or_default();
    apply_flags(&mut policy, &args.filesystem);
    apply_network_flags(&mut policy, &args.network);
    if args.no_debug {
        policy.process.debug = Some(false);
    }
    for logged in &args.log {
        match logged {
            args::LoggedCalls::Signals => policy.logging.signals = Some(true),
            args::LoggedCalls::Files => policy.logging.file_operations = Some(true),
        }
    }
    policy.check_size().map_err(PolicyError::from).context("policy")?;
    Ok((file.is_some() || policy != Policy::default()).then(|| (&policy).into()))
}

/// No sandbox can hold another one yet.
fn refuse_nested(args: &args::SandboxArgs) -> Result<()> {
    for (is_set, name) in
        [(args.containers, "--containers"), (args.vm, "--vm"), (args.allow_kvm, "--allow-kvm")]
    {
        anyhow::ensure!(
            !is_set,
            "{name}: containers and virtual machines inside a sandbox are not supported; to run the command \
             itself in a container, use --mode container"
        );
    }
    Ok(())
}

fn apply_flags(policy: &mut Policy, flags: &args::FilesystemArgs) {
    let filesystem = &mut policy.filesystem;
    if flags.is_static {
        filesystem.mode = Some(FilesystemMode::Static);
    }
    if flags.dynamic {
        filesystem.mode = Some(FilesystemMode::Dynamic);
    }
    let lists = [
        (&mut filesystem.read_only_paths, &flags.ro),
        (&mut filesystem.read_write_paths, &flags.rw),
        (&mut filesystem.overlay_paths, &flags.overlay),
    ];
    for (list, added) in lists.into_iter().filter(|(_, added)| !added.is_empty()) {
        list.get_or_insert_default().extend(added.iter().cloned());
    }
    filesystem.denied_paths.extend(flags.deny.iter().cloned());
    if !flags.volumes.is_empty() {
        filesystem.volumes.get_or_insert_default().extend(flags.volumes.iter().cloned());
    }
    if flags.image_profile.is_some() {
        policy.container.profile.clone_from(&flags.image_profile);
    }
}

fn apply_network_flags(policy: &mut Policy, flags: &args::NetworkArgs) {
    if !flags.hosts.is_empty() {
        policy.network.allowed_hosts.get_or_insert_default().extend(flags.hosts.iter().cloned());
    }
    if !flags.ports.is_empty() {
        policy.network.allowed_ports.get_or_insert_default().extend(&flags.ports);
    }
}

async fn check(client: &Client, file: &Path, mode: Option<Mode>, output: Output) -> Result<()> {
    let request = CheckPolicyRequest { policy: load(Some(file))?, mode: mode_to_proto(mode) };
    let policy = client.call(request).await?;
    let text = policy_from_proto(Some(policy.clone()))?.write(Format::Yaml)?;
    output.print_message_as(&policy, text.trim_end())
}

/// The mode as requests have it.
pub(crate) fn mode_to_proto(mode: Option<Mode>) -> i32 {
    mode.map_or(SandboxMode::Unspecified, SandboxMode::from).into()
}

pub(crate) fn policy_from_proto(policy: Option<v1::Policy>) -> Result<Policy, PolicyError> {
    Policy::try_from(policy.unwrap_or_default())
}

fn to_text(explained: &ExplainPolicyResponse) -> Result<String> {
    let fields = explained
        .fields
        .iter()
        .map(|field| vec![field.field.clone(), field.value.clone(), field.source().word()]);
    let limits = fields::rows(&to_dynamic(&explained.limits.unwrap_or_default())?).into_iter();
    let mounts = explained.mounts.iter().map(|mount| {
        let (target, options) = mount.split_once(' ').unwrap_or((mount, ""));
        vec![target.to_owned(), options.to_owned()]
    });
    let parts = [
        format!("mode {}", explained.mode().word()),
        table(&["FIELD", "VALUE", "SOURCE"], fields),
        table(&["LIMIT", "VALUE"], limits),
        table(&["MOUNT", "OPTIONS"], mounts),
    ];
    let count = parts.len() - usize::from(explained.mounts.is_empty());
    Ok(parts[..count].join("\n\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_flags_extend_the_policy() {
        let mut policy = Policy::default();
        apply_network_flags(&mut policy, &args::NetworkArgs::default());
        assert_eq!(policy, Policy::default());
        policy.network.allowed_hosts = Some(vec!["a.example".to_owned()]);
        let flags = args::NetworkArgs {
            hosts: vec!["set:pypi".to_owned()],
            ports: vec![443],
            ..Default::default()
        };
        assert_eq!(flags.requested_mode(), Some(codelia_types::NetworkMode::Proxy));
        apply_network_flags(&mut policy, &flags);
        let text = "network: {allowed_hosts: [a.example, 'set:pypi'], allowed_ports: [443]}";
        assert_eq!(policy, Policy::parse(text, Format::Yaml).unwrap());
    }

    #[test]
    fn flags_extend_the_policy() {
        let mut policy = Policy::default();
        apply_flags(&mut policy, &args::FilesystemArgs::default());
        assert_eq!(policy, Policy::default());
        policy.filesystem.overlay_paths = Some(vec!["/a".into()]);
        let flags = args::FilesystemArgs {
            is_static: true,
            ro: vec!["/r".into()],
            overlay: vec!["/b".into()],
            deny: vec!["/r/d".into()],
            image_profile: Some("python".to_owned()),
            ..Default::default()
        };
        apply_flags(&mut policy, &flags);
        let text =
            "filesystem: {mode: static, read_only_paths: [/r], overlay_paths: [/a, /b], denied_paths: [/r/d]}
container: {profile: python}";
        assert_eq!(policy, Policy::parse(text, Format::Yaml).unwrap());
        apply_flags(&mut policy, &args::FilesystemArgs { dynamic: true, ..Default::default() });
        assert_eq!(policy.filesystem.mode, Some(FilesystemMode::Dynamic));
    }
}
