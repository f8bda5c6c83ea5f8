//! The live page in a real browser, which offers the test the verbs of a reader.
//!
//! What a screen shows comes from the same calls that the test can make, so tests compare the two. Time is the test's:
//! the page asks again only when the test lets time pass.
//!
//! `make test` runs `smoke` and `serving`. The other tests are for the long runs (`./scripts/endure console::`): each of
//! them takes seconds. Modules that only compute are tested without a browser, in `tests/console`.

pub(crate) mod browser;
mod charts;
mod everyone;
mod finding;
mod front;
mod hostile;
mod login;
mod nights;
mod page;
pub(crate) mod pictures;
mod reading;
mod serving;
mod smoke;
mod viewing;
mod walks;

use self::browser::Browser;
pub(crate) use self::page::Page;
use crate::support::TestApp;

/// A new page at an address of the live page, such as `#/policies/default`. Its timers stand still.
pub(crate) async fn open(app: &TestApp, hash: &str) -> Page {
    let page = Browser::shared().page().await;
    page.hold_time().await;
    page.goto(&format!("{}/{hash}", app.url)).await;
    page
}

/// The origin of a service: what all requests of its page begin with.
pub(crate) fn origin(app: &TestApp) -> &str {
    &app.url
}
