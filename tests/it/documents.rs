//! Every path and name that the documents mention exists: a document that is not compiled keeps the names of what was
//! moved or renamed.
//!
//! Names stand between backticks. What is only an example, or belongs to the reader or to another project, is listed
//! below. The texts of code blocks run in `snippets`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::LazyLock,
};

use regex::Regex;

use crate::snippets::{documents, repository};

/// What documents name although it is not in the repository, with the reason.
const ELSEWHERE: &[(&str, &str)] = &[
    ("target/", "builds"),
    ("crates/formats/src/sharegpt.rs", "the example of a recipe"),
    ("max_response_tokens", "the example of a recipe"),
    ("tests/plugin_contracts", "a folder of slime"),
    ("pg_upgrade", "a program of Postgres"),
    ("monday.db", "a file of the reader"),
];

/// Documents about other projects: the options in them are often those of the project.
const ABOUT_OTHERS: [&str; 7] = [
    "docs/connect.md",
    "docs/frameworks.md",
    "docs/python-slime.md",
    "docs/python-tinker.md",
    "docs/python-trl.md",
    "docs/python-verl.md",
    "docs/slime-buffer.md",
];

/// Documents about the code, in which also a short path names a file.
const ABOUT_THE_CODE: [&str; 3] = ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/RELIABILITY.md"];

/// It names what was.
const HISTORY: &str = "CHANGELOG.md";

/// Whether the name of a file ends so.
fn is_a(file: &str, extension: &str) -> bool {
    Path::new(file).extension().is_some_and(|found| found == extension)
}

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("the pattern is valid")
}

/// All files of the repository, and the folders that they are in.
#[derive(Default)]
struct Repository {
    paths: BTreeSet<String>,
    /// The words of all files that are no documents, and of the names of all files.
    words: BTreeSet<String>,
    /// Modules and crates of Rust.
    modules: BTreeSet<String>,
    /// Items and public fields of Rust.
    items: BTreeSet<String>,
}

/// Folders of the checkout that are no part of the repository: builds, and what programs leave there.
const NOT_OURS: [&str; 5] = ["target", "data", "runs", "models", "__pycache__"];

/// Adds the paths of all files below a folder, relative to the repository.
fn files_below(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("the folder can be read").path();
        let name = path.file_name().and_then(|name| name.to_str()).expect("names are text");
        if name.starts_with('.') || NOT_OURS.contains(&name) {
            continue;
        }
        if path.is_dir() {
            files_below(&path, found);
        } else {
            let relative = path.strip_prefix(repository()).expect("it is below");
            found.push(relative.to_str().expect("names are text").to_owned());
        }
    }
}

static REPOSITORY: LazyLock<Repository> = LazyLock::new(|| {
    let mut files = Vec::new();
    files_below(repository(), &mut files);
    let word = regex("[A-Za-z_][A-Za-z0-9_]*");
    let inline_module = regex(r"(?m)^\s*(?:pub(?:\([^)]*\))? )?mod (\w+)");
    let item = regex(r"\b(?:fn|struct|enum|trait|type|const|static|mod)\s+(\w+)");
    let field = regex(r"(?m)^\s*pub(?:\([^)]*\))? (\w+):");
    let crate_name = regex(r#"(?m)^name = "([\w-]+)""#);
    let mut found = Repository::default();
    for file in &files {
        found.paths.extend(Path::new(file).ancestors().filter_map(Path::to_str).map(str::to_owned));
        found.words.extend(word.find_iter(file).map(|word| word.as_str().to_owned()));
        let Ok(text) = fs::read_to_string(repository().join(file)) else { continue };
        // This file has the names that are nowhere else.
        if !is_a(file, "md") && !Path::new(file).ends_with("documents.rs") {
            found.words.extend(word.find_iter(&text).map(|word| word.as_str().to_owned()));
        }
        if is_a(file, "rs") {
            found.modules.extend(inline_module.captures_iter(&text).map(|name| name[1].to_owned()));
            found.items.extend(item.captures_iter(&text).map(|name| name[1].to_owned()));
            found.items.extend(field.captures_iter(&text).map(|name| name[1].to_owned()));
        } else if Path::new(file).ends_with("Cargo.toml") {
            found.modules.extend(crate_name.captures_iter(&text).map(|name| name[1].replace('-', "_")));
        }
    }
    found
});

impl Repository {
    /// Whether there is a path, which may have `*` and `{a,b}` as shells do.
    fn has(&self, path: &str, is_short: bool) -> bool {
        let path = path.trim_end_matches('/');
        let mut pattern = regex::escape(path).replace(r"\*", "[^/]*");
        pattern = pattern.replace(r"\{", "(?:").replace(r"\}", ")").replace(',', "|");
        let pattern = regex(&format!("^{}{pattern}$", if is_short { "(?:.*/)?" } else { "" }));
        self.paths.contains(path) || self.paths.iter().any(|found| pattern.is_match(found))
    }

    /// Whether a path begins with a folder or a file at the top of the repository.
    fn is_from_the_top(&self, path: &str) -> bool {
        path.split_once('/').is_some_and(|(top, _)| self.paths.contains(top))
    }

    fn has_words(&self, text: &str) -> bool {
        text.split(|character: char| !character.is_ascii_alphanumeric() && character != '_').all(|word| {
            word.is_empty() || word.starts_with(|first: char| first.is_ascii_digit()) || self.words.contains(word)
        })
    }
}

/// A document without its code blocks.
fn prose(document: &str) -> String {
    let text = fs::read_to_string(repository().join(document)).expect("the document can be read");
    let mut is_code = false;
    let lines = text.lines().map(|line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        if is_code || is_fence { "" } else { line }
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn is_elsewhere(name: &str) -> bool {
    ELSEWHERE.iter().any(|(other, _)| Path::new(name).ends_with(other))
}

/// What stands between backticks, with its line.
fn names(text: &str) -> Vec<(usize, String)> {
    let name = regex("`([^`]+)`");
    let lines = text.lines().zip(1..);
    lines
        .flat_map(|(line, number)| {
            let found: Vec<_> = name.captures_iter(line).map(|found| (number, found[1].to_owned())).collect();
            found
        })
        .collect()
}

/// Checks all documents, and fails with the place of each name that a check refuses.
fn check(is_dead: impl Fn(&str, &str) -> bool) {
    let mut dead = Vec::new();
    for document in documents().iter().filter(|document| *document != HISTORY) {
        for (line, name) in names(&prose(document)) {
            if !is_elsewhere(&name) && is_dead(document, &name) {
                dead.push(format!("{document}:{line}: `{name}`"));
            }
        }
    }
    assert!(dead.is_empty(), "documents name what does not exist:\n{}", dead.join("\n"));
}

/// Whether a file defines a function or, in the other languages, a class.
fn defines(file: &str, name: &str) -> bool {
    let kinds = if is_a(file, "rs") { "fn" } else { "def|class|function|const" };
    let defined = regex(&format!(r"\b(?:{kinds})\s+{name}\b"));
    fs::read_to_string(repository().join(file)).is_ok_and(|text| defined.is_match(&text))
}

#[test]
fn paths_in_documents_exist() {
    let path = regex(r"^\.?/?([\w.*{},-]+(?:/[\w.*{},-]+)*/?)$");
    let file = regex(r"\.(?:rs|py|js|cjs|mjs|md|toml|json|sh|sql|css|svg|txt|yml)$");
    check(|document, name| {
        let Some(found) = path.captures(name) else { return false };
        let found = &found[1];
        let is_short = ABOUT_THE_CODE.contains(&document) && !REPOSITORY.is_from_the_top(found);
        let is_path = REPOSITORY.is_from_the_top(found) || (is_short && (found.ends_with('/') || file.is_match(found)));
        is_path && !REPOSITORY.has(found, is_short)
    });
}

/// Documents name functions as `file.rs::function` or `file.rs::Type::function`. In a cell of a table, the names behind
/// one are of the same file.
#[test]
fn functions_in_documents_are_in_the_files_that_are_named_with_them() {
    let in_file = regex(r"^([\w./-]+\.(?:rs|py|js))((?:::\w+)*)::(\w+)$");
    let plain = regex(r"^[a-z_]\w*$");
    let (mut count, mut dead) = (0, Vec::new());
    for document in documents() {
        let text = prose(&document);
        for cell in text.lines().flat_map(|line| line.split(" | ")) {
            let mut file = None;
            for (_, name) in names(cell) {
                let is_there = if let Some(found) = in_file.captures(&name) {
                    file = Some(found[1].to_owned());
                    let source = fs::read_to_string(repository().join(&found[1])).unwrap_or_default();
                    found[2].split("::").all(|owner| source.contains(owner)) && defines(&found[1], &found[3])
                } else if let Some(file) = file.as_ref().filter(|_| plain.is_match(&name)) {
                    !ABOUT_THE_CODE.contains(&document.as_str()) || defines(file, &name)
                } else {
                    file = None;
                    continue;
                };
                count += 1;
                if !is_there {
                    dead.push(format!("{document}: `{name}`"));
                }
            }
        }
    }
    assert!(dead.is_empty(), "documents name functions that do not exist:\n{}", dead.join("\n"));
    assert!(count > 20, "only {count} functions are named");
}

#[test]
fn items_of_rust_in_documents_exist() {
    let item = regex(r"^[A-Za-z_]\w*(?:::[A-Za-z_]\w*)+$");
    let is_module = |name: &str| {
        REPOSITORY.modules.contains(name) || REPOSITORY.has(name, true) || REPOSITORY.has(&format!("{name}.rs"), true)
    };
    check(|_, name| {
        let mut segments: Vec<&str> = name.split("::").collect();
        // `utoipa::path` is an attribute of a library.
        if !item.is_match(name) || segments[0] == "utoipa" {
            return false;
        }
        let last = segments.pop().expect("there are two");
        let is_type = |name: &str| name.starts_with(char::is_uppercase) && REPOSITORY.items.contains(name);
        let is_there = REPOSITORY.items.contains(last) || is_module(last);
        !is_there || !segments.iter().all(|segment| is_module(segment) || is_type(segment))
    });
}

/// Options, metrics, variables of the environment, fields and tests.
#[test]
fn names_in_documents_are_in_the_code() {
    let own = regex(r"^(?:FOREBAY_[A-Z0-9_]+|forebay_[a-z0-9_]+)$");
    let any = regex(r"^[a-z_][a-z0-9_]*(?:\.[a-z_][a-z0-9_]*)+$|^[a-z]+(?:_[a-z0-9]+)+$");
    check(|document, name| {
        let name = name.split('=').next().unwrap_or_default();
        let is_ours = own.is_match(name) || (any.is_match(name) && !ABOUT_OTHERS.contains(&document));
        is_ours && !REPOSITORY.has_words(name)
    });
}

/// Clients are written from this table, and the exceptions of Python are compared with it.
#[test]
fn every_problem_type_is_in_the_table() {
    // Only agents get these, as an error of their dialect.
    const OF_AGENTS: [&str; 2] = ["session-busy", "session-full"];
    let api = fs::read_to_string(repository().join("docs/api.md")).expect("it is there");
    let (_, table) = api.split_once("\n## Problem types\n").expect("it has the table");
    let table = table.split("\n## ").next().unwrap_or_default();
    let made = regex(r#"\b(?:StatusCode|S)::[A-Z_]+,\s*"([a-z-]+)""#);
    let mut files = Vec::new();
    files_below(&repository().join("crates/api/src"), &mut files);
    let mut kinds = BTreeSet::new();
    for file in files.iter().filter(|file| is_a(file, "rs")) {
        let text = fs::read_to_string(repository().join(file)).expect("it is there");
        kinds.extend(made.captures_iter(&text).map(|found| found[1].to_owned()));
    }
    let is_missing =
        |kind: &&String| !OF_AGENTS.contains(&kind.as_str()) && !table.contains(&format!("\n| `{kind}` | "));
    assert_eq!(kinds.iter().filter(is_missing).collect::<Vec<_>>(), Vec::<&String>::new());
    assert!(kinds.len() > 40, "only {} types are found in the code", kinds.len());
}

#[test]
fn verbs_of_make_in_documents_exist() {
    let makefile = fs::read_to_string(repository().join("Makefile")).expect("it is there");
    let (target, help) = (regex(r"(?m)^([a-z-]+):"), regex(r"(?m)^([a-z-]+):.* ## "));
    let found = |pattern: &Regex| -> BTreeSet<String> {
        pattern.captures_iter(&makefile).map(|found| found[1].to_owned()).collect()
    };
    let (targets, verbs) = (found(&target), found(&help));
    let verb = regex(r"^(?:[A-Z_]+=\S+ )*make ([a-z-]+)\b(?:.* (?:NAME|ONLY)=([a-z_-]+))?");
    check(|_, name| {
        verb.captures(name).is_some_and(|found| match (&found[1], found.get(2)) {
            (verb, _) if !verbs.contains(verb) => true,
            ("demo", Some(name)) => !REPOSITORY.paths.contains(&format!("examples/{}.toml", name.as_str())),
            (verb, Some(name)) => !targets.contains(&format!("{verb}-{}", name.as_str())),
            (_, None) => false,
        })
    });
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(document: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let text = prose(document);
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    headings
        .map(|heading| {
            let kept = heading.chars().filter(|kept| kept.is_alphanumeric() || matches!(kept, ' ' | '-' | '_'));
            let anchor = kept.collect::<String>().to_lowercase().replace(' ', "-");
            let count = seen.entry(anchor.clone()).or_default();
            *count += 1;
            if *count == 1 { anchor } else { format!("{anchor}-{}", *count - 1) }
        })
        .collect()
}

#[test]
fn links_in_documents_lead_to_files_and_headings() {
    let link = regex(r"\]\(([^)\s]*)\)");
    let mut dead = Vec::new();
    for document in documents() {
        let folder = Path::new(&document).parent().expect("a document is in a folder");
        let text = prose(&document);
        for target in link.captures_iter(&text).map(|found| found[1].to_owned()).filter(|link| !link.contains("://")) {
            let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let linked =
                if path.is_empty() { document.clone() } else { folder.join(path).to_string_lossy().into_owned() };
            let is_there = repository().join(&linked).exists();
            if !is_there || (!anchor.is_empty() && is_a(&linked, "md") && !anchors(&linked).contains(anchor)) {
                dead.push(format!("{document}: {target}"));
            }
        }
    }
    assert!(dead.is_empty(), "links lead nowhere:\n{}", dead.join("\n"));
}
