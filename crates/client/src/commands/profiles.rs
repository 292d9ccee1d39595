//! `codelia profiles …`.

use anyhow::Result;
use codelia_proto::v1::{GetProfileRequest, ListProfilesRequest, Profile};

use crate::{args, client::Client, output::Output};

/// Executes `codelia profiles`.
pub(crate) async fn profiles(
    client: &Client,
    command: args::Profiles,
    output: Output,
) -> Result<()> {
    match command {
        args::Profiles::List => {
            let listed = client.policies().list_profiles(ListProfilesRequest {}).await?;
            let header = ["PROFILE", "FROM", "DESCRIPTION"];
            output.print_list(&header, &listed.into_inner().profiles, |profile| {
                vec![profile.name.clone(), origin(profile).to_owned(), profile.description.clone()]
            })
        }
        args::Profiles::Show { profile: name } => {
            output.print_message(&client.call(GetProfileRequest { name }).await?)
        }
    }
}

fn origin(profile: &Profile) -> &'static str {
    if profile.built_in { "codelia" } else { "operator" }
}
