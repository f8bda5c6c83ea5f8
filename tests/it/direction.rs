//! The direction of imports: `facades` uses `api`, and the imports of modules have no cycle. Cargo holds the direction
//! between crates.
//!
//! The sources are read as text. Comments do not count, because documentation may link to any module; tests inside the
//! sources do count.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

/// Modules and crates that a module must not import.
const FORBIDDEN: [(&str, &[&str]); 3] = [
    ("api", &["facades", "rusqlite", "sqlx"]),
    ("agents", &["api", "facades", "rusqlite", "sqlx"]),
    ("facades", &["agents", "rusqlite", "sqlx"]),
];

/// For each module, the modules that it imports, with the files that import them.
type Graph = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The text of a file without comment lines.
fn code(path: &Path) -> String {
    let text = std::fs::read_to_string(path).expect("source is text");
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The modules that `lib.rs` declares.
fn modules() -> Vec<String> {
    let declared = regex::Regex::new(r"(?m)^(?:pub )?mod (\w+);").expect("the pattern is valid");
    declared.captures_iter(&code(&source().join("lib.rs"))).map(|found| found[1].to_owned()).collect()
}

/// The files of a module, with their names below `src`.
fn files(module: &str) -> Vec<(String, PathBuf)> {
    let mut files = Vec::new();
    let mut places = vec![source().join(format!("{module}.rs")), source().join(module)];
    while let Some(place) = places.pop() {
        if place.is_dir() {
            let entries = std::fs::read_dir(&place).expect("the source can be read");
            places.extend(entries.map(|entry| entry.expect("the source can be read").path()));
        } else if place.exists() {
            let name = place.strip_prefix(source()).expect("the file is below the source");
            files.push((name.display().to_string(), place));
        }
    }
    files
}

/// The first names of all paths that begin with `crate::` in a text, including those in braces.
fn crate_paths(code: &str) -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    for (place, found) in code.match_indices("crate::") {
        let rest = &code[place + found.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            named.insert(first_name(rest));
            continue;
        };
        let mut depth = 0;
        let mut starts = true;
        for (place, character) in group.char_indices() {
            match character {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => starts = true,
                _ if starts && !character.is_whitespace() => {
                    named.insert(first_name(&group[place..]));
                    starts = false;
                }
                _ => {}
            }
        }
    }
    named
}

fn first_name(path: &str) -> String {
    path.chars().take_while(|character| character.is_alphanumeric() || *character == '_').collect()
}

/// For each module of the crate, the other modules that it imports.
fn imports() -> Graph {
    let modules = modules();
    let mut graph = Graph::new();
    for module in &modules {
        let named = graph.entry(module.clone()).or_default();
        for (name, path) in files(module) {
            for other in
                crate_paths(&code(&path)).into_iter().filter(|other| other != module && modules.contains(other))
            {
                named.entry(other).or_default().insert(name.clone());
            }
        }
    }
    graph
}

/// Returns a cycle of imports if there is one: each module imports the next, and the last imports the first.
fn cycle(graph: &Graph) -> Option<Vec<String>> {
    fn visit<'g>(graph: &'g Graph, module: &'g str, path: &mut Vec<&'g str>, done: &mut BTreeSet<&'g str>) -> bool {
        path.push(module);
        for next in graph.get(module).into_iter().flat_map(BTreeMap::keys) {
            if let Some(start) = path.iter().position(|visited| *visited == next) {
                path.drain(..start);
                return true;
            }
            if !done.contains(next.as_str()) && visit(graph, next, path, done) {
                return true;
            }
        }
        path.pop();
        done.insert(module);
        false
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|module| {
        let mut path = Vec::new();
        let found = visit(graph, module, &mut path, &mut done);
        found.then(|| path.into_iter().map(str::to_owned).collect())
    })
}

#[test]
fn modules_import_only_permitted_modules() {
    let mut found = Vec::new();
    for (module, forbidden) in FORBIDDEN {
        let files = files(module);
        assert!(!files.is_empty(), "{module} has no source");
        for (name, path) in files {
            let code = code(&path);
            let named = crate_paths(&code);
            for other in forbidden {
                let is_crate = regex::Regex::new(&format!(r"\b{other}::")).expect("the pattern is valid");
                let is_named = if modules().iter().any(|module| module == other) {
                    named.contains(*other)
                } else {
                    is_crate.is_match(&code)
                };
                found.extend(is_named.then(|| format!("{name} names {other}")));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn no_modules_import_each_other_in_a_cycle() {
    let graph = imports();
    let Some(cycle) = cycle(&graph) else { return };
    let next = |place: usize| &cycle[(place + 1) % cycle.len()];
    let steps: Vec<String> = cycle
        .iter()
        .enumerate()
        .map(|(place, module)| format!("{module} -> {}: {:?}", next(place), graph[module][next(place)]))
        .collect();
    panic!("these modules import each other in a circle:\n{}", steps.join("\n"));
}

#[test]
fn paths_are_found_in_all_their_forms() {
    let code = "use crate::{\n    buffer::{ids::{A, B}, store},\n    clock::Timestamp,\n};\nuse crate::metrics::Metrics;\n\
                fn f() { crate::store::open(); $crate::tls::x!() }";
    let expected = ["buffer", "clock", "metrics", "store", "tls"].map(str::to_owned);
    assert_eq!(crate_paths(code), BTreeSet::from(expected));
    assert!(imports()["facades"].contains_key("api"), "facades use the transport of the API");
}

#[test]
fn a_cycle_is_found_wherever_it_begins() {
    let graph = |edges: &[(&str, &str)]| {
        let mut graph = Graph::new();
        for (from, to) in edges {
            graph.entry((*from).to_owned()).or_default().entry((*to).to_owned()).or_default();
            graph.entry((*to).to_owned()).or_default();
        }
        graph
    };
    assert_eq!(cycle(&graph(&[("a", "b"), ("a", "c"), ("b", "c"), ("c", "d")])), None);
    let found = cycle(&graph(&[("a", "b"), ("b", "c"), ("c", "d"), ("d", "b")]));
    assert_eq!(found, Some(["b", "c", "d"].map(str::to_owned).to_vec()));
}
