//! What the fuzz targets run, one function each.
//!
//! Apart from the targets so that the service's own tests, which need no nightly compiler, can run it as well.

pub mod checks;
