//! The checks that the fuzz targets run, one function each.
//!
//! The checks are separate from the targets, so that the service's own tests, which use no nightly compiler, can run
//! them too.

pub mod checks;
