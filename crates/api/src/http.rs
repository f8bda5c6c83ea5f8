//! What every listener of the service shares: byte budgets, bodies, who may call, errors, pages.

pub mod accept;
pub mod body;
pub mod budgets;
pub(crate) mod compression;
pub mod framing;
pub mod guard;
pub(crate) mod headers;
pub(crate) mod observe;
pub(crate) mod pages;
pub(crate) mod params;
pub mod problem;
pub(crate) mod refusals;
pub mod roles;
pub(crate) mod uploads;
