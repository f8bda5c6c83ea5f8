//! All names that filters know, for people and editors.

use forebay_wire::FilterNames;

use super::{
    check::{FUNCTIONS, MACROS, METHODS},
    variables,
};

/// The variables of both scopes, the functions and the macros.
#[must_use]
pub fn names_on_wire() -> FilterNames {
    let names = |known: &[(&str, _)]| known.iter().map(|(name, _)| (*name).to_owned()).collect();
    FilterNames {
        variables: variables::on_wire(),
        functions: names(&FUNCTIONS),
        methods: names(&METHODS),
        macros: MACROS.split(", ").map(str::to_owned).collect(),
    }
}
