//! Which `codelia up` a `codelia down` stops.

use std::process::Command;

use anyhow::Result;
use codelia_tests::{Process, Screen, Up};

/// Starts `up` in the foreground, listed in the same directory as the others of the test.
async fn start(place: &Up, listed_in: &Up) -> Result<Process> {
    let mut command = place.up_command();
    command.env("CODELIA_INSTANCES_DIR", listed_in.directory().join("instances"));
    let mut up = Process::start("up", command, place.directory())?;
    up.ready().await?;
    Ok(up)
}

/// `codelia down` without a data directory.
fn down(place: &Up) -> Command {
    let mut command = place.command(&["down"]);
    command.env("CODELIA_INSTANCES_DIR", place.directory().join("instances"));
    command.env_remove("CODELIA_DATA_DIR");
    command
}

#[tokio::test]
async fn down_names_its_instance_and_never_guesses() -> Result<()> {
    let (one, two) = (Up::new()?, Up::new()?);
    let (mut first, mut second) = (start(&one, &one).await?, start(&two, &one).await?);
    let named = |place: &Up, up: &Process| format!("{} (pid {})", place.data().display(), up.pid());
    let (first_name, second_name) = (named(&one, &first), named(&two, &second));

    let refused = Screen::of(&down(&one), 200).await?;
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert_eq!(
        refused.lines[0],
        "error: 2 instances of `codelia up` are running; name the one to stop:"
    );
    let mut listed = refused.lines[1..].to_vec();
    listed.sort();
    let mut expected = [&first_name, &second_name].map(|name| format!("  --data-dir {name}"));
    expected.sort();
    assert_eq!(listed, expected);
    assert!(!first.has_ended()? && !second.has_ended()?, "a refused `down` stops nothing");

    let mut by_name = down(&one);
    by_name.arg("--data-dir").arg(two.data());
    for (command, name) in [(by_name, &second_name), (down(&one), &first_name)] {
        let done = Screen::of(&command, 200).await?;
        let expected = ["stopping", "stopped"].map(|verb| format!("{verb} `codelia up` in {name}"));
        assert_eq!((done.lines.as_slice(), done.code), (expected.as_slice(), Some(0)));
    }
    assert!(first.exited().await?.success() && second.exited().await?.success());
    let done = Screen::of(&down(&one), 200).await?;
    assert!(done.code == Some(0) && done.lines[0].starts_with("no `codelia up` runs"), "{done:?}");
    for place in [&one, &two] {
        place.leak_guard().expect_no_processes().await;
    }
    Ok(())
}
