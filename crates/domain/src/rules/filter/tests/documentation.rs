//! Tests that `docs/filters.md` lists exactly the variables of the tables.

use super::super::variables;

const BEGIN: &str = "<!-- The tables of variables are those of crates/domain/src/rules/filter/variables.rs; a test compares them. -->\n\n";
const END: &str = "<!-- End of the tables of variables. -->";

#[test]
fn the_documentation_lists_the_variables_that_there_are() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/filters.md");
    let text = std::fs::read_to_string(path).expect("the documentation of filters is there");
    let section = text.split_once(BEGIN).and_then(|(_, rest)| rest.split_once(END)).map(|(section, _)| section);
    let expected = variables::documentation();
    assert_eq!(
        section,
        Some(expected.as_str()),
        "docs/filters.md should have, between its two comments:\n\n{expected}"
    );
}
