//! `codelia profiles …`.

use anyhow::{Context, Result};
use codelia_proto::v1::{GetProfileRequest, ListProfilesRequest, Profile};
use serde_json::{Value, json};

use super::policy::policy_from_proto;
use crate::{args, client::Client, output::Output, record};

/// Executes `codelia profiles`.
pub(crate) async fn profiles(client: &Client, command: args::Profiles, output: Output) -> Result<()> {
    let mut policies = client.policies();
    match command {
        args::Profiles::List => {
            let profiles = policies.list_profiles(ListProfilesRequest {}).await?.into_inner().profiles;
            let header = ["PROFILE", "FROM", "DESCRIPTION"];
            output.print_list(&header, &profiles, summary, |profile| {
                vec![profile.name.clone(), origin(profile).to_owned(), profile.description.clone()]
            })
        }
        args::Profiles::Show { profile: name } => {
            let shown = policies.get_profile(GetProfileRequest { name }).await?.into_inner().profile;
            let mut shown = shown.context("the server sent no profile")?;
            let policy = policy_from_proto(shown.policy.take())?;
            let mut fields = summary(&shown);
            fields["policy"] = serde_json::to_value(policy.set_fields())?;
            output.print_fields(&fields)
        }
    }
}

fn summary(profile: &Profile) -> Value {
    json!({
        "profile": profile.name,
        "description": profile.description,
        "from": origin(profile),
        "env": profile.env,
        "limits": profile.limits.as_ref().map(record::limits),
    })
}

fn origin(profile: &Profile) -> &'static str {
    if profile.built_in { "codelia" } else { "operator" }
}
