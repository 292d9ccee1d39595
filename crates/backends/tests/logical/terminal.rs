//! Commands with a terminal.

use std::{fs::File, io::Read};

use codelia_backends::Stdio;
use codelia_sys::pty::{Pty, WindowSize, set_window_size};
use codelia_types::{Outcome, TerminalSize};

use crate::harness::{Fixture, command};

/// Reads until `until` holds or the command closes the terminal (EIO).
fn read_terminal(mut controller: &File, until: impl Fn(&str) -> bool) -> String {
    let (mut text, mut bytes) = (String::new(), [0; 1024]);
    while !until(&text) {
        match controller.read(&mut bytes) {
            Ok(0) | Err(_) => break,
            Ok(count) => text.push_str(std::str::from_utf8(&bytes[..count]).unwrap()),
        }
    }
    text
}

#[tokio::test]
async fn terminal_is_controlling_and_resizes() {
    let fixture = Fixture::new().await;
    let pty = Pty::open(WindowSize { columns: 97, rows: 31 }).unwrap();
    let stream = || pty.terminal.try_clone().unwrap();
    let stdio = Stdio { stdin: stream(), stdout: stream(), stderr: stream() };
    let script = "test -t 0 && test -t 1 && test -t 2 || exit 9; stty size
        echo controlling > /dev/tty; trap 'stty size; exit 3' WINCH; echo ready; while :; do read line; done";
    let mut command = command(&["sh", "-c", script]);
    command.terminal = Some(TerminalSize { columns: 97, rows: 31 });
    let mut running = fixture.prepare().await.launch(&command, stdio).await.unwrap().running;
    drop(pty.terminal);

    let controller = File::from(pty.controller);
    let output = read_terminal(&controller, |text| text.contains("ready"));
    assert_eq!(output, "31 97\r\ncontrolling\r\nready\r\n");
    set_window_size(&controller, WindowSize { columns: 50, rows: 10 }).unwrap();
    let rest = tokio::task::spawn_blocking(move || read_terminal(&controller, |_| false));
    assert_eq!(running.wait().await.0, Outcome::Exited(3));
    assert_eq!(rest.await.unwrap(), "10 50\r\n");
    assert!(running.destroy().await.is_clean());
}
