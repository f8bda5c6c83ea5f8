//! The page and its files as a browser gets them.

use serde_json::Value;

use super::{open, origin};
use crate::support::on_both_stores;

on_both_stores! {
    async fn the_page_comes_from_the_service_alone_and_breaks_no_rule_of_its_policy(app: TestApp) {
        let page = open(app, "").await;
        page.wait_for("document.querySelector('h1') !== null").await;
        let fetched = page.requests();
        assert!(fetched.iter().any(|request| request.ends_with("/console/app.js")), "{fetched:?}");
        page.assert_clean(origin(app));
    }

    async fn the_policy_of_the_page_refuses_scripts_and_markup_of_others(app: TestApp) {
        let page = open(app, "").await;
        page.wait_for("document.querySelector('h1') !== null").await;
        // As code of the page would do it: what a test evaluates is not bound by the policy.
        let refused = "new Promise((answer) => {
            document.addEventListener('securitypolicyviolation', ({effectiveDirective}) => answer(effectiveDirective));
            const image = document.createElement('img');
            image.src = 'http://192.0.2.1/';
            document.body.append(image);
        })";
        assert_eq!(page.eval(refused).await, "img-src");
        let markup = "(() => { try { document.body.innerHTML = '<b>'; return 'set'; } catch { return 'refused'; } })()";
        assert_eq!(page.eval(markup).await, "refused");
        let style = "(() => { const mark = document.createElement('p'); mark.setAttribute('style', 'width: 7px'); \
             document.body.append(mark); return mark.style.width; })()";
        assert_eq!(page.eval(style).await, Value::from(""));
        assert!(!page.complaints().is_empty(), "the browser reports what it refused");
    }
}
