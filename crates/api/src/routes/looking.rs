//! What people and dashboards look at. Nothing here changes anything.

pub(crate) mod content;
pub(crate) mod exports;
pub(crate) mod filters;
pub(crate) mod journal;
pub(crate) mod series;
pub(crate) mod steps;
pub(crate) mod why;
