//! The thread of a model: takes commands between two tokens, and lets all running sequences draw their next token.
//!
//! libtorch blocks, so the model has a thread of its own, and everyone else talks to it by messages. The thread owns the
//! weights and all sequences; there are no locks.
//!
//! Sequences join and leave between two tokens. After an exchange of the weights the caches of running sequences are
//! computed again. This costs one more pass over their tokens, and makes every later token exactly one of the new
//! weights: its log-probability is that of a forward pass over the whole sequence.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
};

use tokio::sync::{mpsc::UnboundedSender, oneshot};

use super::{
    Limits, pass,
    request::Ending,
    sequence::{Accepted, Sequence},
};
use crate::{
    engine::PauseMode,
    model::{InferenceModel, ModelConfig},
};

/// What the thread is told.
#[derive(Debug)]
pub(super) enum Command {
    /// Begin a request.
    Submit(Box<Accepted>),
    /// Nobody waits for this request any more.
    Cancel(u64),
    /// Abort the requests of this name, or all.
    Abort(Option<String>),
    /// Draw nothing until told to continue.
    Pause(PauseMode, oneshot::Sender<()>),
    /// Draw again.
    Continue(oneshot::Sender<()>),
    /// Free the caches; they are computed again.
    Flush(oneshot::Sender<()>),
    /// Draw with these weights from the next token on.
    Exchange(Box<Weights>, oneshot::Sender<Result<(), OtherShape>>),
    /// Abort everything, from now on.
    Stop,
}

/// Weights and their label.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) model: InferenceModel,
    pub(super) version: Arc<str>,
}

/// The weights are not those of the same model.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the configuration of the new weights differs from that of the model that is served")]
pub(super) struct OtherShape;

/// The way to a model's thread.
#[derive(Clone, Debug)]
pub(super) struct Commands(mpsc::Sender<Command>);

impl Commands {
    /// Sends a command. If the thread has ended, the command is dropped, and with it the channel of its answer.
    pub(super) fn send(&self, command: Command) {
        let _ = self.0.send(command);
    }
}

/// What others may know of a model's thread.
#[derive(Debug)]
pub(super) struct Gauges {
    running: AtomicUsize,
    waiting: AtomicUsize,
    drawn: AtomicUsize,
    cached_peak: AtomicUsize,
    version: Mutex<Arc<str>>,
}

impl Gauges {
    /// Number of sequences that draw.
    pub(super) fn running(&self) -> usize {
        self.running.load(Ordering::Relaxed)
    }

    /// Number of sequences that wait for a place or for their cache.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Number of tokens that were drawn.
    pub(super) fn drawn(&self) -> usize {
        self.drawn.load(Ordering::Relaxed)
    }

    /// Largest number of tokens that caches had memory for at once.
    pub(super) fn cached_peak(&self) -> usize {
        self.cached_peak.load(Ordering::Relaxed)
    }

    /// Label of the weights that draw the next token.
    pub(super) fn version(&self) -> Arc<str> {
        Arc::clone(&self.version.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Reports the end of the thread, also by a panic.
struct Farewell {
    name: String,
    ended: UnboundedSender<String>,
}

impl Drop for Farewell {
    fn drop(&mut self) {
        let _ = self.ended.send(std::mem::take(&mut self.name));
    }
}

/// The state of the thread.
#[derive(Debug)]
pub(super) struct Runner {
    commands: mpsc::Receiver<Command>,
    gauges: Arc<Gauges>,
    weights: Weights,
    limits: Limits,
    /// Number of tokens that all caches may hold.
    cache_tokens: usize,
    waiting: VecDeque<Sequence>,
    /// In the order in which they began.
    running: Vec<Sequence>,
    is_paused: bool,
    is_stopped: bool,
}

impl Runner {
    /// Starts the thread. It ends when the last sender of commands is gone, and then sends its name to `ended`.
    pub(super) fn start(
        name: &str,
        weights: Weights,
        limits: Limits,
        ended: UnboundedSender<String>,
    ) -> std::io::Result<(Commands, Arc<Gauges>)> {
        let (sender, commands) = mpsc::channel();
        let gauges = Arc::new(Gauges {
            running: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            drawn: AtomicUsize::new(0),
            cached_peak: AtomicUsize::new(0),
            version: Mutex::new(Arc::clone(&weights.version)),
        });
        let runner = Self {
            commands,
            gauges: Arc::clone(&gauges),
            cache_tokens: limits.cache_tokens(&weights.model),
            weights,
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            is_paused: false,
            is_stopped: false,
        };
        let farewell = Farewell { name: name.to_owned(), ended };
        std::thread::Builder::new().name(format!("model {name}")).spawn(move || {
            let _farewell = farewell;
            runner.run();
        })?;
        Ok((Commands(sender), gauges))
    }

    fn run(mut self) {
        while self.take_commands() {
            if !self.is_paused {
                self.pass();
            }
            self.gauges.running.store(self.running.len(), Ordering::Relaxed);
            self.gauges.waiting.store(self.waiting.len(), Ordering::Relaxed);
        }
    }

    /// Obeys the commands that have arrived, and waits for one if there is nothing else to do. Returns false if no more
    /// commands can arrive.
    fn take_commands(&mut self) -> bool {
        let is_idle = self.is_paused || (self.running.is_empty() && self.waiting.is_empty());
        if is_idle {
            match self.commands.recv() {
                Ok(command) => self.obey(command),
                Err(mpsc::RecvError) => return false,
            }
        }
        while let Ok(command) = self.commands.try_recv() {
            self.obey(command);
        }
        true
    }

    fn obey(&mut self, command: Command) {
        // A caller that has gone needs no answer.
        match command {
            Command::Submit(accepted) => self.submit(*accepted),
            Command::Cancel(id) => self.abort("the client has disconnected", |sequence| sequence.id() == id),
            Command::Abort(None) => self.abort("aborted by a client", |_| true),
            Command::Abort(Some(rid)) => {
                self.abort("aborted by a client", |sequence| sequence.request().rid == rid);
            }
            Command::Pause(mode, done) => {
                self.pause(mode);
                let _ = done.send(());
            }
            Command::Continue(done) => {
                self.is_paused = false;
                let _ = done.send(());
            }
            Command::Flush(done) => {
                self.forget_caches();
                let _ = done.send(());
            }
            Command::Exchange(weights, done) => {
                let _ = done.send(self.exchange(*weights));
            }
            Command::Stop => {
                self.is_stopped = true;
                self.abort("the server stops", |_| true);
            }
        }
    }

    fn submit(&mut self, accepted: Accepted) {
        let sequence = Sequence::new(accepted, &self.weights.model);
        if self.is_stopped {
            sequence.end(Ending::Abort("the server stops"));
        } else {
            self.waiting.push_back(sequence);
        }
    }

    fn abort(&mut self, reason: &'static str, is_meant: impl Fn(&Sequence) -> bool) {
        let running = self.running.extract_if(.., |sequence| is_meant(sequence));
        running.for_each(|sequence| sequence.end(Ending::Abort(reason)));
        for sequence in std::mem::take(&mut self.waiting) {
            if is_meant(&sequence) {
                sequence.end(Ending::Abort(reason));
            } else {
                self.waiting.push_back(sequence);
            }
        }
    }

    fn pause(&mut self, mode: PauseMode) {
        self.is_paused = true;
        match mode {
            PauseMode::Abort => self.abort("generation is paused", |_| true),
            PauseMode::Retract => {
                while !self.running.is_empty() {
                    self.retract();
                }
            }
            PauseMode::InPlace => {}
        }
    }

    fn exchange(&mut self, weights: Weights) -> Result<(), OtherShape> {
        if !have_one_shape(weights.model.config(), self.weights.model.config()) {
            return Err(OtherShape);
        }
        *self.gauges.version.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&weights.version);
        self.weights = weights;
        self.forget_caches();
        Ok(())
    }

    fn forget_caches(&mut self) {
        for sequence in &mut self.running {
            sequence.forget(&self.weights.model);
        }
    }

    /// Returns the youngest running sequence to the front of those that wait.
    fn retract(&mut self) {
        if let Some(mut sequence) = self.running.pop() {
            sequence.forget(&self.weights.model);
            self.waiting.push_front(sequence);
        }
    }

    /// Runs the model once.
    fn pass(&mut self) {
        self.begin_waiting();
        let counts = self.plan();
        let endings = pass::run(&self.weights, &mut self.running, &counts);
        self.gauges.drawn.fetch_add(endings.drawn, Ordering::Relaxed);
        let cached = self.running.iter().map(|sequence| sequence.cache.capacity()).sum();
        self.gauges.cached_peak.fetch_max(cached, Ordering::Relaxed);
        // From the last to the first, so that the indices of the others stay valid.
        for (index, ending) in endings.ended.into_iter().rev() {
            self.running.remove(index).end(ending);
        }
    }

    /// Lets sequences begin while there is a place, and room for the tokens that they have.
    fn begin_waiting(&mut self) {
        let mut used: usize = self.running.iter().map(|sequence| sequence.capacity_after(sequence.lacking())).sum();
        while self.running.len() < self.limits.running {
            let Some(first) = self.waiting.front() else { break };
            used += first.capacity_after(first.lacking());
            if used > self.cache_tokens && !self.running.is_empty() {
                break;
            }
            self.running.extend(self.waiting.pop_front());
        }
    }

    /// Decides how many tokens each running sequence takes through the model in the next pass. Retracts sequences until
    /// the caches have room for this.
    fn plan(&mut self) -> Vec<usize> {
        let mut counts = share(self.running.iter().map(Sequence::lacking), self.limits.piece_tokens);
        // A request that needs more than all caches is refused before it comes here, so one sequence always fits.
        while counts.len() > 1 && self.capacity_after(&counts) > self.cache_tokens {
            self.retract();
            counts.pop();
        }
        counts
    }

    fn capacity_after(&self, counts: &[usize]) -> usize {
        self.running.iter().zip(counts).map(|(sequence, &count)| sequence.capacity_after(count)).sum()
    }
}

/// Shares a pass among sequences that lack these numbers of tokens in their caches. A sequence that lacks only its newest
/// token takes it. The others take `piece` tokens together, the oldest first.
fn share(lacking: impl Iterator<Item = usize>, mut piece: usize) -> Vec<usize> {
    let take = |lacking: usize| {
        if lacking == 1 {
            return 1;
        }
        let count = lacking.min(piece);
        piece -= count;
        count
    };
    lacking.map(take).collect()
}

/// Whether the weights of one model can take the place of the other's.
fn have_one_shape(left: &ModelConfig, right: &ModelConfig) -> bool {
    // These do not change what is computed.
    let comparable = |config: &ModelConfig| ModelConfig {
        end_tokens: Vec::new(),
        initializer_range: 0.0,
        max_position_embeddings: 0,
        ..config.clone()
    };
    comparable(left) == comparable(right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_share_a_pass_and_hold_up_no_sequence_that_draws() {
        assert_eq!(share([1, 30, 1, 90, 40, 1].into_iter(), 100), [1, 30, 1, 70, 0, 1]);
        assert_eq!(share([500].into_iter(), 100), [100]);
    }
}
