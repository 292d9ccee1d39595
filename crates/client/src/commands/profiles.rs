//! `codelia profiles …`.

use anyhow::{Context, Result};
use codelia_proto::v1::{GetProfileRequest, ListProfilesRequest, Profile};

use crate::{args, client::Client, output::Output};

/// Executes `codelia profiles`.
pub(crate) async fn profiles(
    client: &Client,
    command: args::Profiles,
    output: Output,
) -> Result<()> {
    let mut policies = client.policies();
    match command {
        args::Profiles::List => {
            let profiles =
                policies.list_profiles(ListProfilesRequest {}).await?.into_inner().profiles;
            let header = ["PROFILE", "FROM", "DESCRIPTION"];
            output.print_list(&header, &profiles, |profile| {
                vec![profile.name.clone(), origin(profile).to_owned(), profile.description.clone()]
            })
        }
        args::Profiles::Show { profile: name } => {
            let shown =
                policies.get_profile(GetProfileRequest { name }).await?.into_inner().profile;
            output.print_message(&shown.context("the server sent no profile")?)
        }
    }
}

fn origin(profile: &Profile) -> &'static str {
    if profile.built_in { "codelia" } else { "operator" }
}
