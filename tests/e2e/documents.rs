//! The documents agree with the repository: links resolve, paths and tests that they name exist,
//! and lines wrap.
//! Each check has a control with made-up input that it must reject.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

const MAX_COLUMNS: usize = 100;

/// Where the tests of a name prefix are.
const TEST_ROOTS: [(&str, &str); 7] = [
    ("e2e", "tests/e2e"),
    ("postgres", "crates/store/tests/postgres"),
    ("worker", "crates/worker/tests/worker"),
    ("logical", "crates/backends/tests/logical"),
    ("conformance", "crates/backends/tests/conformance"),
    ("filter", "crates/backends/tests/filter"),
    ("egress", "crates/egress/tests/proxy"),
];

/// Where sources may name documents, and the extension of their files.
const SOURCES: [(&str, &str); 6] = [
    ("crates", "rs"),
    ("tests", "rs"),
    ("benches", "rs"),
    ("migrations", "sql"),
    ("proto", "proto"),
    ("deploy", "yaml"),
];

/// Macros that generate a test from each name they are given.
const TEST_MACROS: [&str; 8] = [
    "in_every_mode!(",
    "in_every_runtime!(",
    "in_modes_that_ask!(",
    "in_modes_that_log!(",
    "in_every_shared_kernel!(",
    "in_mode!(",
    "with_every_engine!(",
    "watched_in_every_tool!(",
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(repository().join(path)).with_context(|| path.to_owned())
}

/// Returns the lines of a document with their numbers, without fenced code blocks.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut fenced = false;
    let mut lines = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            lines.push((number, line));
        }
    }
    lines
}

/// Returns the inline code of a text.
fn inline_code(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Returns the code and proof columns of the requirement tables.
fn requirement_cells(text: &str) -> Vec<String> {
    let rows = text.lines().filter(|line| line.starts_with('|'));
    // A cell may contain an escaped bar.
    let cells =
        rows.map(|row| row.replace("\\|", " ").split('|').map(str::to_owned).collect::<Vec<_>>());
    cells
        .filter(|cells| cells.len() >= 6)
        .flat_map(|cells| cells[3..cells.len() - 1].to_vec())
        .collect()
}

/// Returns whether a word is a path below `crates/` or below the top of the repository.
fn is_path(word: &str) -> bool {
    let Some((first, rest)) = word.split_once('/') else { return false };
    let is_known = ["crates", "."].iter().any(|base| {
        let dir = repository().join(base).join(first);
        !first.is_empty() && dir.is_dir()
    });
    is_known && !rest.contains(' ')
}

/// Expands the first `{a,b}` and, by recursion, all others.
fn expand(pattern: &str) -> Vec<String> {
    let Some((before, rest)) = pattern.split_once('{') else { return vec![pattern.to_owned()] };
    let Some((inside, after)) = rest.split_once('}') else { return vec![pattern.to_owned()] };
    inside.split(',').flat_map(|choice| expand(&format!("{before}{choice}{after}"))).collect()
}

/// Returns whether a file name matches a component with at most one `*` or `<placeholder>`.
fn matches(component: &str, name: &str) -> bool {
    let star = component.split_once('*');
    let placeholder =
        || component.split_once('<').and_then(|(head, rest)| Some((head, rest.split_once('>')?.1)));
    match star.or_else(placeholder) {
        Some((head, tail)) => name.starts_with(head) && name.ends_with(tail),
        None => component == name,
    }
}

fn exists_below(base: &Path, pattern: &str) -> bool {
    let (component, rest) = pattern.split_once('/').unwrap_or((pattern, ""));
    let entries = fs::read_dir(base).into_iter().flatten().flatten();
    let found: Vec<_> =
        entries.filter(|entry| matches(component, &entry.file_name().to_string_lossy())).collect();
    match rest {
        "" => !found.is_empty(),
        rest => found.iter().any(|entry| exists_below(&entry.path(), rest)),
    }
}

/// Returns the paths in a text that do not exist.
fn missing_paths(text: &str) -> Vec<String> {
    let patterns = inline_code(text).into_iter().filter(|word| is_path(word)).flat_map(expand);
    let exists = |pattern: &String| {
        let pattern = pattern.trim_end_matches('/');
        ["crates", "."].iter().any(|base| exists_below(&repository().join(base), pattern))
    };
    patterns.filter(|pattern| !exists(pattern)).collect()
}

/// Returns the number and width of lines that are too long. Tables, code and links may be longer.
fn long_lines(text: &str) -> Vec<(usize, usize)> {
    let may_be_long = |line: &str| {
        line.trim_start().starts_with('|') || line.contains("](") || line.contains("://")
    };
    let wrapped = prose(text).into_iter().filter(|(_, line)| !may_be_long(line));
    wrapped
        .map(|(number, line)| (number, line.chars().count()))
        .filter(|(_, width)| *width > MAX_COLUMNS)
        .collect()
}

/// Returns all files with an extension below a directory, without what was built there.
fn files_below(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let (dirs, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let here =
        files.into_iter().filter(|path| path.extension().is_some_and(|ending| ending == extension));
    let dirs = dirs.iter().filter(|dir| !dir.ends_with("target"));
    here.chain(dirs.flat_map(|dir| files_below(dir, extension))).collect()
}

/// Returns the documents, as paths in the repository.
fn documents() -> Result<Vec<PathBuf>> {
    let top = fs::read_dir(repository())?.flatten().map(|entry| entry.path());
    let top = top.filter(|path| path.extension().is_some_and(|ending| ending == "md"));
    let below = ["docs", "deploy"].map(|dir| files_below(&repository().join(dir), "md"));
    let all = top.chain(below.into_iter().flatten());
    all.map(|path| Ok(path.strip_prefix(repository())?.to_owned())).collect()
}

/// Returns the targets of links in a document, without those to the web.
fn links(text: &str) -> Vec<&str> {
    let lines = prose(text);
    let inline = lines.iter().flat_map(|(_, line)| line.split("](").skip(1));
    let inline = inline.map(|rest| rest.split(')').next().unwrap_or_default());
    let definitions = lines.iter().filter(|(_, line)| line.starts_with('['));
    let definitions = definitions.filter_map(|(_, line)| Some(line.split_once("]: ")?.1));
    inline.chain(definitions).filter(|link| !link.contains(':')).collect()
}

/// Returns the anchor of a heading, as forges make it.
fn anchor(heading: &str) -> String {
    let kept =
        heading.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

fn has_anchor(text: &str, wanted: &str) -> bool {
    let headings = prose(text).into_iter().filter(|(_, line)| line.starts_with('#'));
    headings.into_iter().any(|(_, line)| anchor(line.trim_start_matches('#')) == wanted)
}

/// Returns the links of a document to files or headings that do not exist.
fn broken_links(document: &Path, text: &str) -> Vec<String> {
    let resolves = |link: &&str| {
        let (path, fragment) = link.split_once('#').unwrap_or((link, ""));
        let target = match path {
            "" => repository().join(document),
            path => repository().join(document.parent().unwrap_or(document)).join(path),
        };
        let holds_anchor =
            || fs::read_to_string(&target).is_ok_and(|text| has_anchor(&text, fragment));
        target.exists() && (fragment.is_empty() || holds_anchor())
    };
    links(text).into_iter().filter(|link| !resolves(link)).map(str::to_owned).collect()
}

/// Returns the documents that a source names and that do not exist.
fn missing_documents(source: &str) -> Vec<String> {
    let is_in_path = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '/' | '-' | '_' | '.');
    let words = source
        .split("docs/")
        .skip(1)
        .map(|rest| rest.chars().take_while(is_in_path).collect::<String>());
    let names = words.map(|word| format!("docs/{}", word.trim_end_matches('.')));
    names.filter(|name| name.ends_with(".md") && !repository().join(name).exists()).collect()
}

/// Returns the module path of a file, such as `files::links`.
fn module_of(root: &Path, file: &Path) -> String {
    let path = file.strip_prefix(root).unwrap_or(file).with_extension("");
    let parts = path.components().map(|part| part.as_os_str().to_string_lossy().into_owned());
    parts
        .filter(|part| !["mod", "main", "lib"].contains(&part.as_str()))
        .collect::<Vec<_>>()
        .join("::")
}

/// Returns the tests in a source file: functions below a test attribute, and names in test macros.
fn tests_in(source: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut is_test = false;
    for line in source.lines().map(str::trim) {
        let code = line.trim_start_matches("async ");
        if line.contains("#[test]") || line.contains("#[tokio::test") {
            is_test = true;
        }
        if let Some(name) =
            code.strip_prefix("fn ").or_else(|| code.split_once("] fn ").map(|(_, name)| name))
        {
            if is_test {
                names.push(name.split(['(', '<']).next().unwrap_or_default().to_owned());
            }
            is_test = false;
        }
    }
    for start in TEST_MACROS {
        for call in source.split(start).skip(1) {
            let list = call
                .split(')')
                .next()
                .unwrap_or_default()
                .rsplit([':', '='])
                .next()
                .unwrap_or_default();
            names.extend(
                list.split(',').map(str::trim).filter(|name| is_name(name)).map(str::to_owned),
            );
        }
    }
    names
}

fn is_name(word: &str) -> bool {
    !word.is_empty()
        && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// Returns every test as `root::module::name`: those of [`TEST_ROOTS`] and the unit tests of
/// crates.
fn all_tests() -> Result<BTreeSet<String>> {
    let mut roots: Vec<(String, PathBuf)> =
        TEST_ROOTS.iter().map(|(name, dir)| ((*name).to_owned(), repository().join(dir))).collect();
    for entry in fs::read_dir(repository().join("crates"))?.flatten() {
        roots.push((entry.file_name().to_string_lossy().into_owned(), entry.path().join("src")));
    }
    let mut tests = BTreeSet::new();
    for (name, root) in roots {
        for file in files_below(&root, "rs") {
            let module = [name.as_str(), &module_of(&root, &file)].join("::");
            let found = tests_in(&fs::read_to_string(&file)?);
            tests.extend(
                found.iter().map(|test| format!("{}::{test}", module.trim_end_matches("::"))),
            );
        }
    }
    Ok(tests)
}

/// Returns the test names in a text that do not exist. `module` and `module::*` name all tests of a
/// module, `module::{one, two}` names two of them, and a bare name of four words or more names a
/// test in any module.
fn missing_tests(text: &str, tests: &BTreeSet<String>) -> Vec<String> {
    let exists = |word: &str| match word.strip_suffix("::*").unwrap_or(word) {
        path if path.contains("::") => {
            tests.contains(path) || tests.iter().any(|test| test.starts_with(&format!("{path}::")))
        }
        name => tests.iter().any(|test| test.ends_with(&format!("::{name}"))),
    };
    let is_test = |word: &String| {
        let name = word.strip_suffix("::*").unwrap_or(word.as_str());
        let is_path = name.contains("::") && name.split("::").all(is_name);
        is_path || (is_name(name) && name.matches('_').count() >= 3)
    };
    let words = inline_code(text).into_iter().flat_map(|word| expand(&word.replace(", ", ",")));
    words.filter(is_test).filter(|word| !exists(word)).collect()
}

#[test]
fn paths_in_documents_exist() -> Result<()> {
    let bad = "`api/src/no_such.rs` `policy/src/{limits,absent}.rs` `store/src/<table>.nope` `docs/absent.md`";
    let control =
        ["api/src/no_such.rs", "policy/src/absent.rs", "store/src/<table>.nope", "docs/absent.md"];
    assert_eq!(missing_paths(bad), control, "the control");
    let good = "`policy/src/{limits,layout}.rs` `store/src/<table>.rs` `scripts/*` `tests/e2e/` `no/path` `a/b c`";
    assert_eq!(missing_paths(good), Vec::<String>::new(), "the control");
    let architecture = read("docs/architecture.md")?;
    let conformance = requirement_cells(&read("docs/conformance.md")?).join("\n");
    for (document, text) in [("architecture.md", architecture), ("conformance.md", conformance)] {
        assert!(
            inline_code(&text).iter().filter(|word| is_path(word)).count() > 20,
            "{document}: few paths found"
        );
        assert_eq!(
            missing_paths(&text),
            Vec::<String>::new(),
            "docs/{document} names paths that do not exist"
        );
    }
    Ok(())
}

/// Returns the test names in a document that do not exist: those that start with one of
/// [`TEST_ROOTS`].
fn missing_root_tests(text: &str, tests: &BTreeSet<String>) -> Vec<String> {
    let roots = TEST_ROOTS.map(|(name, _)| format!("{name}::"));
    let is_rooted = |name: &String| roots.iter().any(|root| name.starts_with(root));
    missing_tests(text, tests).into_iter().filter(is_rooted).collect()
}

#[test]
fn tests_named_in_conformance_exist() -> Result<()> {
    let tests = all_tests()?;
    assert!(tests.len() > 400, "only {} tests found", tests.len());
    let bad = "`e2e::documents::{paths_in_documents_exist, absent}` `e2e::absent::*` `conformance::absent` \
               `no_test_of_this_name`";
    let control =
        ["e2e::documents::absent", "e2e::absent::*", "conformance::absent", "no_test_of_this_name"];
    assert_eq!(missing_tests(bad, &tests), control, "the control");
    let good = "`e2e::documents::paths_in_documents_exist` `e2e::files::*` `conformance::limits::memory_is_limited`";
    assert_eq!(missing_tests(good, &tests), Vec::<String>::new(), "the control");
    let named = requirement_cells(&read("docs/conformance.md")?).join("\n");
    let missing = missing_tests(&named, &tests);
    assert!(missing.is_empty(), "docs/conformance.md names tests that do not exist: {missing:#?}");
    Ok(())
}

#[test]
fn tests_named_in_documents_exist() -> Result<()> {
    let tests = all_tests()?;
    let text =
        "`e2e::documents::absent` `store::absent` `limits.absent_key_of_policy` `e2e::files::*`";
    assert_eq!(missing_root_tests(text, &tests), ["e2e::documents::absent"], "the control");
    let mut missing = Vec::new();
    for document in documents()? {
        let text = fs::read_to_string(repository().join(&document))?;
        let name = document.display();
        missing
            .extend(missing_root_tests(&text, &tests).iter().map(|test| format!("{name}: {test}")));
    }
    assert!(missing.is_empty(), "{missing:#?}");
    Ok(())
}

/// The lists of exceptions and of cases in the VM name cases as strings.
#[test]
fn listed_conformance_cases_exist() -> Result<()> {
    let tests = all_tests()?;
    let missing = |source: &str| -> Vec<String> {
        let strings = source.split('"').skip(1).step_by(2);
        let names = strings.map(|text| text.rsplit("::").next().unwrap_or(text));
        let names = names.filter(|name| is_name(name) && name.matches('_').count() >= 2);
        names
            .filter(|name| !tests.iter().any(|test| test.ends_with(&format!("::{name}"))))
            .map(str::to_owned)
            .collect()
    };
    assert_eq!(missing(r#"("no_such_case", "reason")"#), ["no_such_case"], "the control");
    for file in ["exceptions.rs", "vm.rs"] {
        let source = read(&format!("crates/backends/tests/conformance/{file}"))?;
        assert_eq!(missing(&source), Vec::<String>::new(), "{file} names cases that do not exist");
    }
    Ok(())
}

#[test]
fn documents_wrap_at_100_columns() -> Result<()> {
    let long = "x".repeat(MAX_COLUMNS + 1);
    let control = format!(
        "{long}\n| {long} |\n```\n{long}\n```\n[a]({long})\n{}\n{long}",
        "ä".repeat(MAX_COLUMNS)
    );
    assert_eq!(long_lines(&control), [(1, 101), (8, 101)], "the control");
    let mut wrong = Vec::new();
    for document in documents()? {
        let lines = long_lines(&fs::read_to_string(repository().join(&document))?);
        let name = document.display();
        wrong.extend(
            lines.into_iter().map(|(number, width)| format!("{name}:{number}: {width} columns")),
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

#[test]
fn documents_of_every_folder_are_checked() -> Result<()> {
    let documents = documents()?;
    for expected in
        ["README.md", "docs/policy.md", "docs/operations/disk.md", "deploy/systemd/README.md"]
    {
        assert!(documents.contains(&PathBuf::from(expected)), "{expected}");
    }
    Ok(())
}

#[test]
fn links_in_documents_resolve() -> Result<()> {
    let text = "[a](operations/disk.md#reserve) [b](operations/absent.md) [c](operations/disk.md#absent)\n\
                [d](https://example.com) [e](#operations) [f](#absent) [g](../deploy)\n\
                [h]: absent.md\n```\n[i](absent.md)\n```\n";
    let control = ["operations/absent.md", "operations/disk.md#absent", "#absent", "absent.md"];
    assert_eq!(broken_links(Path::new("docs/operations.md"), text), control, "the control");
    let mut broken = Vec::new();
    for document in documents()? {
        let text = fs::read_to_string(repository().join(&document))?;
        let name = document.display();
        broken.extend(broken_links(&document, &text).iter().map(|link| format!("{name}: {link}")));
    }
    assert!(broken.is_empty(), "{broken:#?}");
    Ok(())
}

#[test]
fn documents_named_in_sources_exist() -> Result<()> {
    let text = "see docs/absent.md. `docs/policy.md`, docs/new.txt, docs/runbooks/{alert}.md";
    assert_eq!(missing_documents(text), ["docs/absent.md"], "the control");
    let (mut count, mut missing) = (0, Vec::new());
    for (root, extension) in SOURCES {
        let files = files_below(&repository().join(root), extension);
        for file in files.iter().filter(|file| !file.ends_with("e2e/documents.rs")) {
            let source = fs::read_to_string(file)?;
            count += source.matches("docs/").count();
            missing.extend(
                missing_documents(&source).iter().map(|name| format!("{}: {name}", file.display())),
            );
        }
    }
    assert!(count > 20, "only {count} names found");
    assert!(missing.is_empty(), "{missing:#?}");
    Ok(())
}
