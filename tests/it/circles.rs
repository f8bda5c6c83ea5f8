//! No more than three files of a crate import each other in a circle: a larger circle can only be read as a whole.
//!
//! A file imports another one if one of its paths leads into the module that the other file defines. An item that a
//! parent passes on with `pub use` counts as the parent's. The root of a crate puts its modules together, so what it
//! imports does not count. Tests are left out, and so is the trainer, whose `serve` has a larger circle.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Attribute, ImplItemFn, Item, ItemFn, ItemImpl, ItemMod, ItemUse, LitStr, Macro, Meta, UseTree, Visibility,
    ext::IdentExt as _,
    visit::{self, Visit},
};

use crate::snippets::repository;

/// The most files of a circle. A parent with two children that share its types is easily read.
const FILES_MAX: usize = 3;

/// The files that each file imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

#[test]
fn no_more_than_three_files_of_a_crate_import_each_other_in_a_circle() {
    let root = repository();
    let crates = fs::read_dir(root.join("crates")).expect("the folder can be read");
    let crates = crates.map(|entry| entry.expect("an entry can be read").path());
    let mut folders: Vec<_> = crates.chain([root.to_owned()]).map(|folder| folder.join("src")).collect();
    folders.sort();
    let mut faults = Vec::new();
    for folder in folders {
        let sources = sources(&folder);
        assert!(!sources.is_empty(), "{} has no files", folder.display());
        let name = folder.strip_prefix(root).expect("the folder is in the repository").display();
        faults.extend(fault(&name.to_string(), &imports(&sources)));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// What is wrong with the imports of a crate, and the way out.
fn fault(folder: &str, imports: &Imports) -> Option<String> {
    let circles: Vec<String> = circles(imports)
        .into_iter()
        .filter(|circle| circle.len() > FILES_MAX)
        .map(|circle| format!("{} ({} files)", circle.join(", "), circle.len()))
        .collect();
    (!circles.is_empty()).then(|| {
        format!(
            "In {folder}, more than {FILES_MAX} files import each other in a circle: {}. Move what they share into a file \
             that imports none of them, and import it from there, not from a parent that passes it on.",
            circles.join("; and ")
        )
    })
}

/// The sets of files of which each reaches each other. A file alone is none.
fn circles(imports: &Imports) -> Vec<Vec<&str>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|file| (file.as_str(), reached(imports, file))).collect();
    let leads = |from: &str, to: &str| reached.get(from).is_some_and(|files| files.contains(to));
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for &file in reached.keys() {
        let circle: Vec<&str> =
            reached.keys().copied().filter(|other| leads(file, other) && leads(other, file)).collect();
        if seen.insert(circle.clone()) && circle.len() > 1 {
            found.push(circle);
        }
    }
    found
}

/// The files that a file imports, and those that they import, and so on.
fn reached<'a>(imports: &'a Imports, file: &'a str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![file];
    while let Some(file) = open.pop() {
        for next in imports.get(file).into_iter().flatten() {
            if reached.insert(next.as_str()) {
                open.push(next);
            }
        }
    }
    reached
}

/// The texts of the files below a folder, by their paths in it.
fn sources(folder: &Path) -> BTreeMap<String, String> {
    fn add(folder: &Path, below: &Path, found: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(below).expect("the folder can be read") {
            let path = entry.expect("an entry can be read").path();
            if path.is_dir() {
                add(folder, &path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("a source is text");
                let name = path.strip_prefix(folder).expect("the file is in the folder");
                found.insert(name.to_str().expect("names are ASCII").to_owned(), text);
            }
        }
    }
    let mut found = BTreeMap::new();
    add(folder, folder, &mut found);
    found
}

/// Which files of a crate import which.
fn imports(sources: &BTreeMap<String, String>) -> Imports {
    let mut imports = Imports::new();
    let is_root = |file: &&String| matches!(file.as_str(), "lib.rs" | "main.rs") || file.starts_with("bin/");
    for root in sources.keys().filter(is_root) {
        let mut tree = Modules { sources, files: BTreeMap::new(), parsed: Vec::new() };
        tree.add_file(&[], root, root.rsplit_once('/').map_or("", |(folder, _)| folder));
        for (module, file, syntax) in &tree.parsed {
            let found = imports.entry(file.clone()).or_default();
            if module.is_empty() {
                continue;
            }
            Paths { files: &tree.files, module: module.clone(), found }.visit_file(syntax);
            found.remove(file);
        }
    }
    imports
}

/// The path of a module from the root of its crate.
type Module = Vec<String>;

/// The modules of a crate.
struct Modules<'a> {
    sources: &'a BTreeMap<String, String>,
    /// The file of each module. A module that is written inside of a file has that file.
    files: BTreeMap<Module, String>,
    parsed: Vec<(Module, String, syn::File)>,
}

impl Modules<'_> {
    /// Adds a file whose modules are in a folder.
    fn add_file(&mut self, module: &[String], file: &str, folder: &str) {
        let syntax = syn::parse_file(&self.sources[file]).unwrap_or_else(|error| panic!("{file}: {error}"));
        self.files.insert(module.to_vec(), file.to_owned());
        self.add_items(module, file, folder, &syntax.items);
        self.parsed.push((module.to_vec(), file.to_owned(), syntax));
    }

    fn add_items(&mut self, module: &[String], file: &str, folder: &str, items: &[Item]) {
        for item in items {
            let Item::Mod(item) = item else { continue };
            if is_for_tests(&item.attrs) {
                continue;
            }
            let name = item.ident.unraw().to_string();
            let inner: Module = module.iter().chain([&name]).cloned().collect();
            let below = if folder.is_empty() { name } else { format!("{folder}/{name}") };
            if let Some((_, items)) = &item.content {
                self.files.insert(inner.clone(), file.to_owned());
                self.add_items(&inner, file, &below, items);
            } else {
                let file = [format!("{below}.rs"), format!("{below}/mod.rs")];
                let file = file.iter().find(|file| self.sources.contains_key(*file));
                self.add_file(&inner, file.unwrap_or_else(|| panic!("the module {below} has no file")), &below);
            }
        }
    }
}

/// Collects the files into which the paths of a module lead.
struct Paths<'a> {
    files: &'a BTreeMap<Module, String>,
    module: Module,
    found: &'a mut BTreeSet<String>,
}

impl Paths<'_> {
    /// Follows a path as far as it leads through modules of this crate.
    fn follow(&mut self, path: &[String]) {
        let is_child =
            |first: &String| self.files.contains_key(&[&self.module[..], std::slice::from_ref(first)].concat());
        let (mut reached, mut rest) = match path {
            [first, rest @ ..] if first == "crate" => (Module::new(), rest),
            [first, rest @ ..] if first == "self" => (self.module.clone(), rest),
            [first, ..] if first == "super" => (self.module.clone(), path),
            [first, _, ..] if is_child(first) => (self.module.clone(), path),
            _ => return,
        };
        while let [first, inner @ ..] = rest {
            if first == "super" {
                reached.pop();
            } else {
                reached.push(first.clone());
                if !self.files.contains_key(&reached) {
                    reached.pop();
                    break;
                }
            }
            rest = inner;
        }
        self.found.insert(self.files[&reached].clone());
    }

    fn follow_use(&mut self, begun: &[String], tree: &UseTree) {
        let with = |name: &syn::Ident| begun.iter().cloned().chain([name.unraw().to_string()]).collect::<Vec<_>>();
        match tree {
            UseTree::Path(path) => self.follow_use(&with(&path.ident), &path.tree),
            UseTree::Name(name) if name.ident == "self" => self.follow(begun),
            UseTree::Rename(name) if name.ident == "self" => self.follow(begun),
            UseTree::Name(name) => self.follow(&with(&name.ident)),
            UseTree::Rename(name) => self.follow(&with(&name.ident)),
            UseTree::Glob(_) => self.follow(begun),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.follow_use(begun, tree)),
        }
    }

    /// Follows the paths among the words of a macro. In an attribute of serde, texts are paths as well.
    fn follow_words(&mut self, words: TokenStream, has_texts: bool) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for word in words {
            match word {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.follow(&std::mem::take(&mut path));
                    }
                    path.push(name.unraw().to_string());
                    colons = 0;
                    continue;
                }
                TokenTree::Punct(sign) if sign.as_char() == ':' => {
                    colons += 1;
                    continue;
                }
                TokenTree::Group(group) => self.follow_words(group.stream(), has_texts),
                TokenTree::Literal(text) if has_texts => {
                    let text = syn::parse_str::<LitStr>(&text.to_string());
                    if let Ok(found) = text.and_then(|text| text.parse::<syn::Path>()) {
                        self.visit_path(&found);
                    }
                }
                TokenTree::Literal(_) | TokenTree::Punct(_) => {}
            }
            self.follow(&std::mem::take(&mut path));
            colons = 0;
        }
        self.follow(&path);
    }
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !is_for_tests(&item.attrs) {
            self.module.push(item.ident.unraw().to_string());
            visit::visit_item_mod(self, item);
            self.module.pop();
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if item.leading_colon.is_none() && !is_for_tests(&item.attrs) {
            self.follow_use(&[], &item.tree);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.unraw().to_string()).collect();
            self.follow(&names);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast Macro) {
        self.follow_words(item.tokens.clone(), false);
        visit::visit_macro(self, item);
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta {
            self.follow_words(list.tokens.clone(), list.path.is_ident("serde"));
        }
    }

    /// `pub(in crate::dialect)` is no import.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }
}

/// Whether an item is only there in tests.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        _ => false,
    })
}

#[test]
fn a_circle_of_four_files_is_named_with_its_files() {
    let sources = made_up(&[
        ("lib.rs", "mod a; mod b; mod c; mod d; mod e; pub use a::A;"),
        ("a.rs", "use crate::b::B; pub struct A;"),
        ("b.rs", "pub struct B; impl B { fn c(&self) -> super::c::C { super::c::C } }"),
        ("c.rs", "pub struct C; fn d() { assert!(crate::d::is_right()); }"),
        ("d.rs", "#[derive(Deserialize)] struct D { #[serde(with = \"crate::a::texts\")] text: String }"),
        ("e.rs", "use crate::{A, d};"),
    ]);
    let fault = fault("made/up", &imports(&sources)).expect("it is too large");
    assert!(fault.starts_with("In made/up,") && fault.contains(": a.rs, b.rs, c.rs, d.rs (4 files)."), "{fault}");
    let mut smaller = sources;
    smaller.insert("d.rs".to_owned(), "#[cfg(test)] mod tests { use crate::a::A; }".to_owned());
    assert!(imports(&smaller)["d.rs"].is_empty(), "what tests import does not count");
}

#[test]
fn a_path_leads_to_the_file_of_its_last_module() {
    let sources = made_up(&[
        ("lib.rs", "mod part; pub use part::Inner;"),
        (
            "part.rs",
            "//! It names [`crate::other::X`].\nmod inner; mod other; mod inside { pub struct Y; } pub use inner::Inner;",
        ),
        ("part/inner.rs", "pub(in crate::part) struct Inner; mod deep { use super::super::inside::Y; }"),
        ("part/other.rs", "use crate::part::{Inner as Other, inner::{self}};"),
    ]);
    let imported = |file: &str| imports(&sources)[file].iter().cloned().collect::<Vec<_>>().join(", ");
    assert_eq!(imported("lib.rs"), "", "the root does not count");
    assert_eq!(imported("part.rs"), "part/inner.rs", "a document imports nothing");
    assert_eq!(imported("part/inner.rs"), "part.rs", "a module inside of a file has that file");
    assert_eq!(imported("part/other.rs"), "part.rs, part/inner.rs", "what a parent passes on is the parent's");
}

fn made_up(files: &[(&str, &str)]) -> BTreeMap<String, String> {
    files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
}
