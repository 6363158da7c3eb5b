// Package remotelm is a client of HTTP servers of language models, vLLM and SGLang. It sends token ids and streams
// back the token ids that the server draws, each with its log-prob or its logits. Ids are never guessed from text.
//
// Dial connects to a server and finds out its Facts: its release, its model, and which kind of number it gives for a
// token. Server.Stream sends a Request and yields Chunks of Tokens. A dialect holds what differs between the kinds of
// server: vLLM streams new tokens, SGLang repeats all tokens in each event.
//
// Servers end streams early, for an update of their weights or because they stop. Stream hides that: it asks again
// from the tokens so far, a bounded number of times. All that a server sends is checked: an impossible number, an id
// outside the vocabulary, and an event that is too large are errors.
package remotelm

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/remotehttp"
)

// Names of the supported kinds of server.
const (
	VLLM   = "vllm"
	SGLang = "sglang"
)

// Names returns the names of the supported kinds of server.
func Names() []string { return []string{VLLM, SGLang} }

// Values of Facts.Values: the number that a server gives for a token.
const (
	Raw       = "raw"       // its log-prob before temperature and filters
	Tempered  = "tempered"  // its log-prob after temperature, before filters
	Processed = "processed" // its log-prob after both
	Logits    = "logits"    // its logit from the model, with the logits of all other tokens
)

// Errors of a server, besides those of a connection. ErrRefused is terminal: the request, or the way the server was
// started, must change. A retry may help against ErrSilent, ErrGarbage and ErrAborted.
var (
	ErrRefused = remotehttp.ErrRefused
	ErrSilent  = remotehttp.ErrSilent
	ErrGarbage = remotehttp.ErrGarbage
	ErrAborted = errors.New("aborted by the server")
	errCut     = errors.New("the answer breaks off")
)

// Config says where a server is and what it must serve.
type Config struct {
	// Server is NAME=URL: vllm=http://127.0.0.1:8000.
	Server string
	// Vocabulary is V, the number of logits of a token.
	Vocabulary int
	// ProbeIDs are token ids of a short prompt. Dial asks the server to continue it, and concludes from the numbers
	// that come with the token which kind they are (Facts.Values).
	ProbeIDs []int32
	// Patience is how long the server may send nothing for a request before the request is sent again; 0: a minute.
	Patience time.Duration
	// Pause is the wait before a stream that broke off is asked for again. It doubles with each failure without a
	// new token. 0: 200 ms.
	Pause time.Duration
	// Key is sent as a bearer token; empty: none is sent.
	Key string
	// Resumed is called with the reason each time a stream that broke off is asked for again; nil: no call.
	Resumed func(err error)
}

// Parse splits NAME=URL into the kind and the base URL of a server, and checks both.
func Parse(server string) (name, base string, err error) {
	name, base, err = remotehttp.Split(server)
	if !slices.Contains(Names(), name) {
		return "", "", fmt.Errorf("%q; must be NAME=URL, NAME one of %s", server, strings.Join(Names(), ", "))
	}
	return name, base, err
}

// Facts are what Dial found out about a server.
type Facts struct {
	// Name is the kind of server, Version its release, Model its own name for its model.
	Name, Version, Model string
	// Values is the number that it gives for a token: Raw, Tempered, Processed or Logits.
	Values string
	// Precision is the element type of the model's logits, fp32, fp16 or bf16, by their spacing; empty: the server
	// gives too few numbers of a token.
	Precision string
	// MaxTokens bounds the tokens of a prompt and its answer together; 0: the server does not say.
	MaxTokens int
	// Route is the path of requests for tokens.
	Route string
}

// Request asks for the tokens that follow a list of tokens.
type Request struct {
	// ID names the request to the server.
	ID string
	// IDs are the tokens so far, at least one.
	IDs []int32
	// MaxTokens is the most tokens to draw, at least one. A token of Stop ends the answer and is part of it.
	MaxTokens int
	Stop      []int32
	// Temperature 0 chooses the likeliest token. TopK 0, TopP 1 and MinP 0 leave out no token.
	Temperature, TopP, MinP float64
	TopK                    int
	// Seed is the seed of the server's random numbers.
	Seed uint64
}

// Token is a token that a server drew.
type Token struct {
	ID int32
	// Value is its number (Facts.Values), Top the number of the likeliest token.
	Value, Top float32
	// Logits [V] are the logits of all tokens, if Facts.Values is Logits; else nil.
	Logits []float32
}

// Values of Chunk.Finish: why a server drew no more tokens.
const (
	Stop   = "stop"
	Length = "length"

	aborted = "abort" // the server's own word for an answer that it ended early
)

// Chunk is some tokens of a stream, in order. The last chunk says why there are no more (Finish).
type Chunk struct {
	Tokens []Token
	Finish string
	// Weights are the versions of the weights in the words of the server, as far as it has told them. Begin and End
	// count tokens of the stream.
	Weights []Span
	// Resumed is how often the answer has broken off and was continued so far.
	Resumed int
}

// Span is the tokens [Begin, End) that were drawn with one version of the weights.
type Span struct {
	Version    string
	Begin, End int
}

// Server is a server that Dial has checked. It is safe for concurrent use.
type Server struct {
	config  Config
	dialect dialect
	facts   Facts
	adapter string // the adapter that requests ask for; empty: the model without one
	http    *remotehttp.Client
}

// dialect is what differs between the kinds of server.
type dialect interface {
	// discover sets all facts but Values and Route.
	discover(ctx context.Context, s *Server, f *Facts) error
	// routes returns the paths of requests for tokens, the best first.
	routes() []string
	// requestBody returns the body of a request for tokens. top is how many numbers of other tokens to ask for with
	// each token; -1: all.
	requestBody(f Facts, r *Request, top int) map[string]any
	// processedKind returns what its numbers are if they depend on the temperature: Tempered or Processed.
	processedKind() string
	// parseEvent returns the tokens of an event that follow the tokens of before.
	parseEvent(f Facts, data []byte, before []int32) (event, error)
	// release makes the server drop a request whose stream is closed before its end.
	release(s *Server, id string)
}

// event is one message of a stream.
type event struct {
	tokens  []scored
	finish  string // in the words of the server
	weights []Span // of the tokens of this request
}

// scored is a token with its number (value) and the numbers (of) of other tokens (ids), in the server's order.
type scored struct {
	id    int32
	value float64
	ids   []int32
	of    []float64
}

// Dial connects to a server and finds out its Facts. An error that wraps ErrRefused says that the server cannot be
// used; after any other error it may not have started yet, and a retry may help.
func Dial(ctx context.Context, c Config) (*Server, error) {
	name, base, err := Parse(c.Server)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRefused, err)
	}
	if c.Patience <= 0 {
		c.Patience = time.Minute
	}
	if c.Pause <= 0 {
		c.Pause = 200 * time.Millisecond
	}
	s := &Server{config: c, facts: Facts{Name: name}, http: remotehttp.New(base, c.Key, c.Patience)}
	s.dialect = vllm{}
	if name == SGLang {
		s.dialect = sglang{vocabulary: c.Vocabulary}
	}
	if err := s.dialect.discover(ctx, s, &s.facts); err != nil {
		if routeClosed(err) {
			err = fmt.Errorf("%w%s", err, s.otherKind(ctx))
		}
		return nil, fmt.Errorf("%s: %w", s, err)
	}
	if err := s.fingerprint(ctx); err != nil {
		return nil, fmt.Errorf("%s: %w", s, err)
	}
	return s, nil
}

// otherKind says which other kind of server answers in the place of the one that is asked for.
func (s *Server) otherKind(ctx context.Context) string {
	for name, d := range map[string]dialect{VLLM: vllm{}, SGLang: sglang{}} {
		if name != s.facts.Name && d.discover(ctx, s, &Facts{}) == nil {
			return fmt.Sprintf("; it is a server of %s: name it %s=%s", name, name, s.http.Base)
		}
	}
	return fmt.Sprintf("; it is no server of %s: is its port right?", strings.Join(Names(), " or "))
}

// String returns the kind and the address of the server.
func (s *Server) String() string { return s.facts.Name + " at " + s.http.Base }

// Facts returns what Dial found out.
func (s *Server) Facts() Facts { return s.facts }

// Close closes idle connections.
func (s *Server) Close() { s.http.Close() }

// maxFailures is how often in a row an answer may break off without a new token before Stream gives up.
const maxFailures = 4

// Stream draws tokens until the answer ends, ctx is done, or the caller stops; a caller that stops early releases
// the request on the server. An error ends the stream; if it wraps ErrRefused it says what to change. A stream that
// breaks off continues from its tokens so far, with another seed: a server cannot restore the state of its random
// numbers.
func (s *Server) Stream(ctx context.Context, r Request) iter.Seq2[Chunk, error] {
	return func(yield func(Chunk, error) bool) {
		first, failed := len(r.IDs), 0
		var weights []Span
		r.IDs = slices.Clone(r.IDs)
		for again := uint64(0); ; again++ {
			drawn := len(r.IDs) - first
			next := r
			next.MaxTokens, next.Seed = r.MaxTokens-drawn, seedOf(r.Seed, again)
			if again > 0 {
				next.ID = fmt.Sprintf("%s-%d", r.ID, again)
			}
			finish, stopped, told := "", false, []Span(nil)
			err := s.generate(ctx, next, s.topCount(), func(e event) bool {
				c := Chunk{Resumed: int(again), Weights: append(slices.Clone(weights), shiftSpans(e.weights, drawn)...)}
				for i := range e.tokens {
					c.Tokens = append(c.Tokens, s.newToken(&e.tokens[i]))
					r.IDs = append(r.IDs, e.tokens[i].id)
				}
				if finish = e.finish; finish == Stop || finish == Length {
					c.Finish = finish
				}
				told = c.Weights
				stopped = (len(c.Tokens) > 0 || c.Finish != "") && !yield(c, nil)
				return !stopped
			})
			switch {
			case stopped || err == nil:
				return
			case ctx.Err() != nil, errors.Is(err, ErrRefused):
				yield(Chunk{}, err)
				return
			}
			if len(told) > 0 {
				weights = told
			}
			if failed++; len(r.IDs)-first > drawn {
				failed = 1
			}
			if r.MaxTokens == len(r.IDs)-first { // all tokens came, only the end of the stream is missing
				yield(Chunk{Finish: Length, Weights: weights, Resumed: int(again)}, nil)
				return
			}
			if failed > maxFailures {
				yield(Chunk{}, fmt.Errorf("%w; given up after %d tries without a token", err, failed))
				return
			}
			if s.config.Resumed != nil {
				s.config.Resumed(err)
			}
			select {
			case <-time.After(s.config.Pause << (failed - 1)):
			case <-ctx.Done():
				yield(Chunk{}, ctx.Err())
				return
			}
		}
	}
}

// seedOf returns the seed of attempt again: another one each time, so that no noise repeats, and below 2^53, which
// every server accepts.
func seedOf(seed, again uint64) uint64 {
	return (seed ^ seed>>53 + again*0x9e3779b97f4a7c15) & (1<<53 - 1)
}

// shiftSpans returns spans with by added to their bounds.
func shiftSpans(spans []Span, by int) []Span {
	out := slices.Clone(spans)
	for i := range out {
		out[i].Begin, out[i].End = out[i].Begin+by, out[i].End+by
	}
	return out
}

// topCount returns how many numbers of other tokens to ask for with each token; -1: all.
func (s *Server) topCount() int {
	if s.facts.Values == Logits {
		return -1
	}
	return fewTop
}

// newToken turns a token of an event into a Token for callers.
func (s *Server) newToken(t *scored) Token {
	out := Token{ID: t.id, Value: float32(t.value), Top: float32(t.value)}
	for _, v := range t.of {
		out.Top = max(out.Top, float32(v))
	}
	if s.facts.Values == Logits {
		out.Logits = make([]float32, s.config.Vocabulary)
		for i, id := range t.ids {
			out.Logits[id] = float32(t.of[i])
		}
	}
	return out
}
