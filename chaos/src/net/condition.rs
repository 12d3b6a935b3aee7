//! What happens to bytes on their way from one node to another.

use std::fmt;
use std::time::Duration;

/// How a path is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cut {
    /// Nothing arrives, and nobody is told: what was sent arrives once the path is sound again, as with lost packets.
    Silent,
    /// Connections are reset, new ones too.
    Reset,
    /// Connections are reset, and nobody listens for new ones: who tries is told at once that nothing was sent.
    Refuse,
}

impl Cut {
    /// Whether those at both ends of a connection are told.
    pub fn is_told(self) -> bool {
        match self {
            Cut::Silent => false,
            Cut::Reset | Cut::Refuse => true,
        }
    }
}

/// Connections that break at a message: where there is nothing to guess about what had arrived by then.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AtMessage {
    /// The probability for each message. One is a DATA frame of HTTP/2 with something in it: of gRPC a request or an answer,
    /// or a part of a large one, or several that travel together.
    pub chance: f64,
    pub when: When,
}

/// When a connection breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum When {
    /// The message does not arrive.
    Before,
    /// The message arrives, and nothing that follows from it comes back.
    After,
}

/// What is wrong with a path. The default is a sound one.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Condition {
    pub cut: Option<Cut>,
    /// Everything arrives this much later.
    pub delay: Duration,
    /// And up to this much later still, at random.
    pub jitter: Duration,
    /// At most so many bytes per second on one connection.
    pub bytes_per_s: Option<u64>,
    /// The probability that a chunk has to be sent again, which takes [`RETRANSMISSION`].
    pub loss: f64,
    /// The probability that a chunk is the last one: the connection is reset instead.
    pub reset: f64,
    /// The probability that a chunk, and with it all that follows on its connection, is held back until bytes of another
    /// connection have passed it, for at most [`HELD_BACK`].
    pub reorder: f64,
    /// Connections break at a message.
    pub at_message: Option<AtMessage>,
}

/// How long TCP waits at least before it sends a lost packet again.
pub const RETRANSMISSION: Duration = Duration::from_millis(200);
/// How long a chunk is held back at most for others to pass it.
pub const HELD_BACK: Duration = Duration::from_millis(250);

/// What becomes of one chunk on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fate {
    /// So much later it arrives, for latency and the width of the line.
    pub slowed: Duration,
    /// It has to be sent again.
    pub lost: bool,
    /// Others go first.
    pub held_back: bool,
}

impl Fate {
    /// How much later than it was sent it arrives, before others are let pass.
    pub fn late(&self) -> Duration {
        if self.lost { self.slowed + RETRANSMISSION } else { self.slowed }
    }
}

impl Condition {
    /// Cut.
    pub fn cut(how: Cut) -> Self {
        Self { cut: Some(how), ..Self::default() }
    }

    /// Each part as bad as the worse of the two.
    #[must_use]
    pub fn worse(&self, other: &Condition) -> Condition {
        Condition {
            cut: self.cut.max(other.cut),
            delay: self.delay.max(other.delay),
            jitter: self.jitter.max(other.jitter),
            bytes_per_s: match (self.bytes_per_s, other.bytes_per_s) {
                (Some(one), Some(two)) => Some(one.min(two)),
                (one, two) => one.or(two),
            },
            loss: self.loss.max(other.loss),
            reset: self.reset.max(other.reset),
            reorder: self.reorder.max(other.reorder),
            at_message: match (self.at_message, other.at_message) {
                (Some(one), Some(two)) => Some(if two.chance > one.chance { two } else { one }),
                (one, two) => one.or(two),
            },
        }
    }

    /// What becomes of a chunk of so many bytes; `chance` gives numbers in 0..1. `None`: the connection is reset instead.
    pub fn fate(&self, bytes: usize, mut chance: impl FnMut() -> f64) -> Option<Fate> {
        if self.reset > 0.0 && chance() < self.reset {
            return None;
        }
        let mut slowed = self.delay;
        if !self.jitter.is_zero() {
            slowed += self.jitter.mul_f64(chance());
        }
        let lost = self.loss > 0.0 && chance() < self.loss;
        if let Some(rate) = self.bytes_per_s {
            slowed += Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
        }
        Some(Fate { slowed, lost, held_back: self.reorder > 0.0 && chance() < self.reorder })
    }

    /// How much later than now anything on its way may still be, as things are; `None`: a narrow line knows no bound.
    pub fn longest(&self) -> Option<Duration> {
        let again = if self.loss > 0.0 { RETRANSMISSION } else { Duration::ZERO };
        self.bytes_per_s.is_none().then_some(self.delay + self.jitter + again)
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        match self.cut {
            Some(Cut::Silent) => parts.push("cut".to_owned()),
            Some(Cut::Reset) => parts.push("reset".to_owned()),
            Some(Cut::Refuse) => parts.push("refused".to_owned()),
            None => {}
        }
        if !self.delay.is_zero() || !self.jitter.is_zero() {
            parts.push(format!("{}+{} ms", self.delay.as_millis(), self.jitter.as_millis()));
        }
        if let Some(rate) = self.bytes_per_s {
            parts.push(format!("{rate} bytes/s"));
        }
        if self.loss > 0.0 {
            parts.push(format!("{:.0} % lost", self.loss * 100.0));
        }
        if self.reset > 0.0 {
            parts.push(format!("{:.1} % reset", self.reset * 100.0));
        }
        if self.reorder > 0.0 {
            parts.push(format!("{:.0} % held back", self.reorder * 100.0));
        }
        if let Some(at) = self.at_message {
            let when = if at.when == When::Before { "before" } else { "after" };
            parts.push(format!("{:.0} % cut {when} a message", at.chance * 100.0));
        }
        f.write_str(if parts.is_empty() { "sound" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lateness_adds_up_and_a_reset_ends_it() {
        let slow = Condition {
            delay: Duration::from_millis(10),
            jitter: Duration::from_millis(20),
            bytes_per_s: Some(1000),
            ..Condition::default()
        };
        let late = |condition: &Condition, numbers: &[f64]| {
            let mut numbers = numbers.iter();
            condition.fate(100, || *numbers.next().unwrap()).map(|fate| fate.late())
        };
        assert_eq!(late(&slow, &[0.5]), Some(Duration::from_millis(10 + 10 + 100)));
        assert_eq!((slow.longest(), Condition::default().longest()), (None, Some(Duration::ZERO)));
        let lossy = Condition { loss: 0.3, reset: 0.1, ..Condition::default() };
        assert_eq!(late(&lossy, &[0.2, 0.2]), Some(RETRANSMISSION));
        assert_eq!(late(&lossy, &[0.05]), None);
        assert_eq!(lossy.longest(), Some(RETRANSMISSION));
        let reordered = Condition { reorder: 0.5, ..Condition::default() };
        assert_eq!(reordered.fate(1, || 0.4), Some(Fate { held_back: true, ..Fate::default() }));
        assert_eq!(Condition::default().fate(1 << 20, || unreachable!()), Some(Fate::default()));
    }

    #[test]
    fn the_worse_of_two_has_the_worse_of_each_part() {
        let one = Condition { cut: Some(Cut::Silent), bytes_per_s: Some(10), ..Condition::default() };
        let two = Condition { cut: Some(Cut::Reset), loss: 0.5, ..Condition::default() };
        let both = one.worse(&two);
        assert_eq!(both, two.worse(&one));
        assert_eq!((both.cut, both.bytes_per_s, both.loss), (Some(Cut::Reset), Some(10), 0.5));
        assert_eq!(Condition::default().worse(&one), one);
    }
}
