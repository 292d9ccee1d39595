//! Commands with a terminal.

use std::{fs::File, io::Read};

use codelia_backends::Stdio;
use codelia_sys::pty::{WindowSize, set_window_size};
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
    let script = "test -t 0 && test -t 1 && test -t 2 || exit 9; stty size
        echo controlling > /dev/tty; trap 'stty size; exit 3' WINCH; echo ready; while :; do read line; done";
    let command = command(&["sh", "-c", script]);
    let stdio = Stdio::Terminal(TerminalSize { columns: 97, rows: 31 });
    let launched = fixture.prepare().await.launch(&command, stdio).await.unwrap();
    let mut running = launched.running;

    let controller = File::from(launched.terminal.unwrap());
    let output = read_terminal(&controller, |text| text.contains("ready"));
    assert_eq!(output, "31 97\r\ncontrolling\r\nready\r\n");
    set_window_size(&controller, WindowSize { columns: 50, rows: 10 }).unwrap();
    let rest = tokio::task::spawn_blocking(move || read_terminal(&controller, |_| false));
    assert_eq!(running.wait().await.0, Outcome::Exited(3));
    assert_eq!(rest.await.unwrap(), "10 50\r\n");
    assert!(running.destroy().await.is_clean());
}
