//! The frames of an HTTP/2 connection as they pass (RFC 9113, section 4.1), followed just far enough to know where a message
//! begins and ends. What is no HTTP/2 is read as if it were, and comes to no harm while nothing is to be cut.

use super::condition::When;

/// What a client says first (RFC 9113, section 3.4).
const PREFACE_BYTES: usize = 24;
/// Length, type, flags and stream.
const HEADER_BYTES: usize = 9;
const DATA: u8 = 0;

/// One direction of a connection.
#[derive(Debug, Clone)]
pub(super) struct Frames {
    /// Bytes until the next header begins.
    skip: usize,
    header: Vec<u8>,
    /// The connection breaks at the end of the frame that is passing.
    doomed: bool,
}

impl Frames {
    /// What a client sends.
    pub fn of_a_client() -> Self {
        Self { skip: PREFACE_BYTES, ..Self::of_a_server() }
    }

    /// What a server sends.
    pub fn of_a_server() -> Self {
        Self { skip: 0, header: Vec::with_capacity(HEADER_BYTES), doomed: false }
    }

    /// Follows a chunk. `dice` is asked at each message whether the connection breaks at it; if so: how many bytes of the
    /// chunk still arrive. Not to be called again then.
    pub fn cut(&mut self, chunk: &[u8], mut dice: impl FnMut() -> Option<When>) -> Option<usize> {
        let mut at = 0;
        while at < chunk.len() {
            if self.skip > 0 {
                let passing = self.skip.min(chunk.len() - at);
                self.skip -= passing;
                at += passing;
                if self.skip == 0 && self.doomed {
                    return Some(at);
                }
                continue;
            }
            let header_begins = at.saturating_sub(self.header.len());
            let missing = (HEADER_BYTES - self.header.len()).min(chunk.len() - at);
            self.header.extend_from_slice(&chunk[at..at + missing]);
            at += missing;
            if let [a, b, c, kind, ..] = self.header[..]
                && self.header.len() == HEADER_BYTES
            {
                self.header.clear();
                self.skip = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
                if kind == DATA && self.skip > 0 {
                    match dice() {
                        Some(When::Before) => return Some(header_begins),
                        Some(When::After) => self.doomed = true,
                        None => {}
                    }
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).unwrap().to_be_bytes();
        let mut frame = vec![length[1], length[2], length[3], kind, 0, 0, 0, 0, 1];
        frame.resize(HEADER_BYTES + payload, 7);
        frame
    }

    /// Preface, settings, headers, a message of 300 bytes, an empty one that ends a stream, a message of 70,000.
    fn sent() -> Vec<u8> {
        let frames = [frame(4, 6), frame(1, 40), frame(DATA, 300), frame(DATA, 0), frame(DATA, 70_000)];
        [vec![b'P'; PREFACE_BYTES], frames.concat()].concat()
    }

    /// How many bytes arrive if the connection breaks at message `n` (from 0), read in chunks of so many bytes.
    fn arriving(n: usize, when: When, chunk: usize) -> (usize, usize) {
        let (mut frames, mut seen, mut arrived) = (Frames::of_a_client(), 0, 0);
        for chunk in sent().chunks(chunk) {
            let mut dice = || {
                seen += 1;
                (seen == n + 1).then_some(when)
            };
            match frames.cut(chunk, &mut dice) {
                None => arrived += chunk.len(),
                Some(end) => return (arrived + end, seen),
            }
        }
        (arrived, seen)
    }

    #[test]
    fn a_message_arrives_whole_or_not_at_all_whatever_the_chunks() {
        let first = PREFACE_BYTES + (HEADER_BYTES + 6) + (HEADER_BYTES + 40);
        let second = first + (HEADER_BYTES + 300) + HEADER_BYTES;
        for chunk in [1, 2, 7, 9, 64, 1000, 1 << 17] {
            assert_eq!(arriving(0, When::After, chunk), (first + HEADER_BYTES + 300, 1), "{chunk}");
            assert_eq!(arriving(1, When::After, chunk), (sent().len(), 2), "{chunk}");
            assert_eq!(arriving(2, When::After, chunk), (sent().len(), 2), "there are two, in chunks of {chunk}");
            for (n, begins) in [(0, first), (1, second)] {
                // A part of its header may have passed, which is no message yet.
                let (arrived, _) = arriving(n, When::Before, chunk);
                assert!((begins..begins + HEADER_BYTES).contains(&arrived), "{arrived} of {begins} in {chunk}");
            }
        }
    }
}
