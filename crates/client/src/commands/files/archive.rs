//! `codelia export` and `codelia import`.

use std::{io::IsTerminal, path::Path, process::ExitCode};

use anyhow::{Result, bail, ensure};
use codelia_proto::v1::{
    ArchiveFormat, ExportFilesRequest, ExportFilesResponse, ExportSummary, ImportFilesFinish,
    ImportFilesOpen, ImportFilesRequest, SkipReason, export_files_response,
    import_files_request::Kind,
};
use indicatif::ProgressBar;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::{
    download::{Sink, Target},
    interrupt::or_signal,
    progress,
    upload::{Messages, Source, send},
};
use crate::{
    args,
    client::Client,
    error_report::AboutFile,
    output::{self, Output},
    resolve,
};

const STDIO: &str = "-";
/// The mode of a new archive. The umask applies.
const FILE_MODE: u32 = 0o666;

/// Packs a directory of a session.
pub(crate) async fn export(
    client: &Client,
    args: &args::Export,
    output: Output,
) -> Result<ExitCode> {
    let is_stdout = args.output == Path::new(STDIO);
    ensure!(
        !is_stdout || !std::io::stdout().is_terminal(),
        "an archive cannot be shown on a terminal: name a file with -o, or use a pipe"
    );
    let is_zstd =
        args.zstd || args.output.extension().is_some_and(|end| end == "zst" || end == "tzst");
    let format = if is_zstd { ArchiveFormat::TarZstd } else { ArchiveFormat::Tar };
    let parent = resolve::session(client, &args.path.session).await?;
    let path = args.path.path.clone();
    let request = ExportFilesRequest { parent, path, format: format.into() };
    let target =
        if is_stdout { Target::Stdout } else { Target::file(args.output.clone(), args.force) };
    let bar = progress::bar(None);
    let packed = async {
        let mut chunks = client.files().export_files(request).await?.into_inner();
        let mut sink = target.open(FILE_MODE)?;
        let summary = receive(&mut chunks, &mut sink, &bar).await?;
        sink.finish()?;
        Ok::<_, anyhow::Error>(summary)
    };
    // Without a temporary file a signal may end the program at once, also while stdout is blocked.
    let summary = if is_stdout {
        packed.await
    } else {
        or_signal(packed, "interrupted; the incomplete archive was removed").await
    };
    bar.finish_and_clear();
    let summary = summary.about_file(&args.path)?;
    report_skipped(&summary);
    if !is_stdout {
        output.print_json(&summary)?;
    }
    Ok(if is_complete(&summary) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Receives an archive up to its summary, without which it is not complete.
async fn receive(
    chunks: &mut Streaming<ExportFilesResponse>,
    sink: &mut Sink,
    bar: &ProgressBar,
) -> Result<ExportSummary> {
    while let Some(chunk) = chunks.message().await? {
        match chunk.kind {
            Some(export_files_response::Kind::Data(data)) => {
                sink.write(&data)?;
                bar.inc(data.len() as u64);
            }
            Some(export_files_response::Kind::Summary(summary)) => return Ok(summary),
            None => {}
        }
    }
    bail!("the archive is not complete: export it again")
}

fn describe(reason: SkipReason) -> &'static str {
    match reason {
        SkipReason::Special => "a special file",
        SkipReason::Permission => "cannot be read by the session's user",
        SkipReason::TooDeep => "its content is too deep",
        SkipReason::Shortened => "became shorter, filled up with zeros",
        SkipReason::Unspecified => "unknown reason",
    }
}

fn report_skipped(summary: &ExportSummary) {
    for file in &summary.skipped {
        output::write_note(&format!("skipped {}: {}", file.path, describe(file.reason())));
    }
    let more = summary.skipped_count - i64::try_from(summary.skipped.len()).unwrap_or(i64::MAX);
    if more > 0 {
        output::write_note(&format!("skipped {more} more files"));
    }
}

/// Whether only special files are missing, which no archive has.
fn is_complete(summary: &ExportSummary) -> bool {
    let special =
        summary.skipped.iter().filter(|file| file.reason() == SkipReason::Special).count();
    i64::try_from(special) == Ok(summary.skipped_count)
}

/// Unpacks an archive in a session.
pub(crate) async fn import(client: &Client, args: &args::Import, output: Output) -> Result<()> {
    let source = if args.file == Path::new(STDIO) {
        Source::stdin()
    } else {
        Source::open(&args.file).await?
    };
    let parent = resolve::session(client, &args.path.session).await?;
    let open = ImportFilesOpen { parent, path: args.path.path.clone(), overwrite: args.force };
    let bar = progress::bar(source.size);
    let messages = Messages {
        open: ImportFilesRequest { kind: Some(Kind::Open(open)) },
        data: |data| ImportFilesRequest { kind: Some(Kind::Data(data.into())) },
        finish: ImportFilesRequest { kind: Some(Kind::Finish(ImportFilesFinish {})) },
    };
    let mut files = client.files();
    let call = async |queue: ReceiverStream<_>| files.import_files(queue).await;
    let imported = send(call, messages, source.bytes, "cannot read the archive", &bar).await;
    bar.finish_and_clear();
    output.print_json(&imported.about_file(&args.path)?)
}
