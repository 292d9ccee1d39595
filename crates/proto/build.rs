//! Compiles `proto/` with protox, so that no `protoc` is needed.

use std::{error::Error, path::Path};

use tonic_prost_build::Config;

const PUBLIC: &[&str] = &[
    "codelia/v1/access.proto",
    "codelia/v1/admin.proto",
    "codelia/v1/approval.proto",
    "codelia/v1/audit.proto",
    "codelia/v1/file.proto",
    "codelia/v1/flag.proto",
    "codelia/v1/info.proto",
    "codelia/v1/policy.proto",
    "codelia/v1/run.proto",
    "codelia/v1/sandbox.proto",
    "codelia/v1/session.proto",
    "codelia/v1/tools.proto",
    "codelia/v1/volume.proto",
];
const INTERNAL: &[&str] = &["codelia/internal/v1/file.proto", "codelia/internal/v1/worker.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    println!("cargo:rerun-if-changed={}", root.display());

    // Reflection shows only the public files. Encoded by protox: prost drops the options of
    // methods.
    let mut public = protox::Compiler::new([&root])?;
    public.include_source_info(true).include_imports(true).open_files(PUBLIC)?;
    let out = std::env::var("OUT_DIR")?;
    std::fs::write(Path::new(&out).join("public.bin"), public.encode_file_descriptor_set())?;

    // The name leads from a message to its descriptor, and so to its JSON.
    let mut names = Config::new();
    names.enable_type_names();
    tonic_prost_build::configure()
        .bytes(".codelia.v1.OutputEvent.data")
        .bytes(".codelia.v1.ReadFileResponse.data")
        .bytes(".codelia.v1.WriteFileRequest.data")
        .bytes(".codelia.v1.ExportFilesResponse.data")
        .bytes(".codelia.v1.ImportFilesRequest.data")
        // Have values of the environment.
        .skip_debug([".codelia.v1.CommandSpec", ".codelia.internal.v1.StartRunRequest"])
        .compile_fds_with_config(protox::compile(PUBLIC.iter().chain(INTERNAL), [&root])?, names)?;
    Ok(())
}
