//! `forebay top`: the overview of the live page, in a terminal.

mod columns;
mod draw;
mod figures;
mod screen;
#[cfg(test)]
mod tests;

use std::{
    io::{IsTerminal as _, Write as _, stdin, stdout},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use clap::Args;
use crossterm::event::{Event, EventStream, KeyEventKind};
use forebay_client::{
    Client, ClientError, RetryPolicy,
    wire::{OverviewPolicy, PolicyWhy},
};
use futures::StreamExt as _;
use ratatui::DefaultTerminal;
use tokio::{sync::mpsc, time::sleep_until};

use self::{
    columns::{COLUMNS, GAP, cells},
    draw::{Theme, draw},
    screen::{Found, Screen, Wish},
};
use super::service::ServiceArgs;

/// Pages of the overview that are read at most; policies are few.
const PAGES_MAX: usize = 10;

/// Most policies in a page.
const PAGE: &str = "200";

/// How long the service may be silent before the screen says that it does not answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// How often ages are drawn anew.
const DRAW_EVERY: Duration = Duration::from_secs(1);

/// The arguments of `forebay top`.
#[derive(Args)]
pub(crate) struct TopArgs {
    /// Seconds between two questions to the service
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    every: u64,
    /// Print the overview once, as plain text, and exit
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    service: ServiceArgs,
}

/// Shows the overview until the user quits.
#[tokio::main(flavor = "current_thread")]
pub(crate) async fn top(args: &TopArgs) -> anyhow::Result<()> {
    let has_terminal = stdin().is_terminal() && stdout().is_terminal();
    if !args.once && !has_terminal {
        bail!("input or output is not a terminal: add --once to print the overview and exit");
    }
    // A question is repeated at the next interval, not before: the user should see at once that there is no answer.
    let client = args.service.client_that_waits(ANSWER_MAX)?;
    let client = client.with_retry(RetryPolicy::none());
    let shown = overview(&client).await.map_err(|error| args.service.failed(error))?;
    let screen = Screen::new(args.service.url.clone(), Duration::from_secs(args.every), shown);
    if args.once {
        return Ok(stdout().write_all(printed(&screen).as_bytes())?);
    }
    let watch = Watch::new(client, &args.service);
    let mut terminal = ratatui::try_init().context("cannot use the terminal")?;
    let outcome = watch.run(&mut terminal, screen).await;
    ratatui::restore();
    outcome
}

/// Reads all policies, or the worst of very many.
async fn overview(client: &Client) -> Result<Found, ClientError> {
    let mut after = None::<String>;
    let (mut at, mut policies) = (String::new(), Vec::<OverviewPolicy>::new());
    for _ in 0..PAGES_MAX {
        let mut query = vec![("limit", PAGE)];
        query.extend(after.as_deref().map(|after| ("after", after)));
        let page = client.overview(&query).await?;
        policies.extend(page.policies);
        (at, after) = (page.at, page.next);
        if after.is_none() {
            break;
        }
    }
    Ok(Found { at: at.parse().ok(), policies, is_whole: after.is_none() })
}

/// The overview as plain text: all columns, each as wide as it needs to be.
fn printed(screen: &Screen) -> String {
    let now = screen.now();
    let mut rows = vec![COLUMNS.iter().map(|column| column.title.to_owned()).collect::<Vec<_>>()];
    rows.extend(
        screen.shown.policies.iter().map(|policy| COLUMNS.iter().map(|column| column.text(policy, now)).collect()),
    );
    let widths: Vec<_> = (0..COLUMNS.len()).map(|index| rows.iter().map(|row| cells(&row[index])).max()).collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for ((cell, column), width) in row.iter().zip(&COLUMNS).zip(&widths) {
            let padding = " ".repeat(width.unwrap_or(0) - cells(cell));
            let parts = if column.is_number { [&padding, cell] } else { [cell, &padding] };
            line.extend(parts.into_iter().map(String::as_str));
            line.push_str(&" ".repeat(GAP));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// An answer of the service.
enum Answer {
    Overview(Result<Found, ClientError>),
    Why(String, Result<Option<PolicyWhy>, ClientError>),
}

/// Asks the service at intervals, and draws what it answers.
struct Watch<'a> {
    client: Client,
    service: &'a ServiceArgs,
    /// Both ends of the channel for answers; `None` follows the last answer to a question.
    answers: (mpsc::Sender<Option<Answer>>, mpsc::Receiver<Option<Answer>>),
    /// Whether answers are awaited.
    is_asking: bool,
    /// Whether to ask again after that, because the user asked meanwhile.
    asks_again: bool,
}

impl<'a> Watch<'a> {
    fn new(client: Client, service: &'a ServiceArgs) -> Self {
        Self { client, service, answers: mpsc::channel(4), is_asking: false, asks_again: false }
    }

    async fn run(mut self, terminal: &mut DefaultTerminal, mut screen: Screen) -> anyhow::Result<()> {
        let theme = Theme { has_colours: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) };
        let mut events = EventStream::new();
        let mut ended = std::pin::pin!(ended());
        let mut next = Instant::now() + screen.every;
        loop {
            terminal.draw(|frame| draw(frame, &mut screen, theme)).context("cannot draw on the terminal")?;
            let may_ask = !self.is_asking && !screen.is_paused;
            let wish = tokio::select! {
                event = events.next() => match event.transpose().context("cannot read the terminal")? {
                    None => Some(Wish::Quit),
                    Some(Event::Key(key)) if key.kind != KeyEventKind::Release => screen.press(key),
                    Some(_) => None,
                },
                Some(answer) = self.answers.1.recv() => {
                    match answer {
                        Some(answer) => self.receive(answer, &mut screen)?,
                        None => self.is_asking = false,
                    }
                    (!self.is_asking && std::mem::take(&mut self.asks_again)).then_some(Wish::Ask)
                }
                () = sleep_until(next.into()), if may_ask => Some(Wish::Ask),
                () = tokio::time::sleep(DRAW_EVERY) => None,
                () = &mut ended => Some(Wish::Quit),
            };
            match wish {
                Some(Wish::Quit) => return Ok(()),
                Some(Wish::Ask) if self.is_asking => self.asks_again = true,
                Some(Wish::Ask) => {
                    next = Instant::now() + screen.every;
                    self.ask(&screen);
                }
                None => {}
            }
        }
    }

    /// Asks for the overview, and for the reasons if they are open.
    fn ask(&mut self, screen: &Screen) {
        self.is_asking = true;
        let (client, answers) = (self.client.clone(), self.answers.0.clone());
        let reading = screen.reading.as_ref().map(|reading| reading.policy.clone());
        tokio::spawn(async move {
            if let Some(policy) = reading {
                let why = client.policy_why(&policy).await;
                let _ = answers.send(Some(Answer::Why(policy, why))).await;
            }
            let _ = answers.send(Some(Answer::Overview(overview(&client).await))).await;
            let _ = answers.send(None).await;
        });
    }

    /// Shows an answer. A key that is no longer accepted ends the program: what it read is no longer for its eyes.
    fn receive(&self, answer: Answer, screen: &mut Screen) -> anyhow::Result<()> {
        match answer {
            Answer::Overview(Ok(shown)) => screen.answer(shown),
            Answer::Overview(Err(error)) | Answer::Why(_, Err(error)) if is_locked_out(&error) => {
                return Err(self.service.failed(error));
            }
            Answer::Overview(Err(error)) => screen.failure = Some(format!("{:#}", self.service.failed(error))),
            Answer::Why(policy, why) => {
                screen.explain(&policy, why.map_err(|error| format!("{:#}", self.service.failed(error))));
            }
        }
        Ok(())
    }
}

fn is_locked_out(error: &ClientError) -> bool {
    matches!(error.kind(), Some("unauthorized" | "forbidden"))
}

/// Waits for a signal that ends the program. Control-C is a key here, because the terminal is raw.
async fn ended() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let kinds = [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt()];
        let Ok(mut signals) = kinds.into_iter().map(signal).collect::<Result<Vec<_>, _>>() else {
            return std::future::pending().await;
        };
        futures::future::select_all(signals.iter_mut().map(|signal| Box::pin(signal.recv()))).await;
    }
    #[cfg(not(unix))]
    std::future::pending::<()>().await;
}
