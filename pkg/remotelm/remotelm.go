// Package remotelm is a client of HTTP servers of language models, vLLM and SGLang. It sends token ids and streams
// back the token ids that the server draws, each with its log-prob or its logits. Ids are never guessed from text.
//
// A Pool is one server or more, of the same model. Pool.Check finds out the Facts of each: its release, its model, and
// which kind of number it gives for a token. Pool.Stream sends a Request and yields Chunks of Tokens. A dialect holds
// what differs between the kinds of server: vLLM streams new tokens, SGLang repeats all tokens in each event.
//
// Servers end streams early, for an update of their weights or because they stop. Stream hides that: it asks again
// from the tokens so far, another server if there is one, a bounded number of times. All that a server sends is
// checked: an impossible number, an id outside the vocabulary, and an event that is too large are errors.
package remotelm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/models/pool"
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
	ErrAway    = pool.ErrAway
	ErrWeights = pool.ErrWeights
	ErrAborted = errors.New("aborted by the server")
	errCut     = errors.New("the answer breaks off")
)

// Config says where servers are and what they must serve.
type Config struct {
	// Server is NAME=URL[,URL ...]: vllm=http://127.0.0.1:8000.
	Server string
	// Vocabulary is V, the number of logits of a token.
	Vocabulary int
	// ProbeIDs are token ids of a short prompt. Each server is asked to continue it. From the numbers that come with
	// the token follows which kind they are (Facts.Values), and whether the server has the weights of the first.
	ProbeIDs []int32
	// Patience is how long the server may send nothing for a request before the request is sent again; 0: a minute.
	Patience time.Duration
	// Pause is the wait before a stream that broke off is asked for again. It doubles with each failure without a
	// new token. 0: 200 ms.
	Pause time.Duration
	// Key is sent as a bearer token; empty: none is sent.
	Key string
	// Concurrency is the most requests that each server gets at once; 0: one.
	Concurrency int
	// Whole has the whole weights of the servers change, by Pool.AddWeights.
	Whole bool
	// Loading is called when a server loads the whole weights of a folder, for which requests wait; nil: no call.
	Loading func(server, folder string)
	remotehttp.Hooks
	// Resumed is called with the reason each time a stream that broke off is asked for again; nil: no call.
	Resumed func(err error)
}

// Facts are what was found out about a server.
type Facts struct {
	// Name is the kind of server, Version its release, Model its own name for the model.
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
	// Whole reports whether it takes whole weights while it runs, and names those of its answers; only with
	// Config.Whole. Adapters is false if it takes no adapters, and whole weights alone.
	Whole, Adapters bool
	// KeepsHead reports whether it keeps a copy of the model's head, so that whole weights do not reach a head that is
	// the embedding: vLLM on CPUs, of which the copy is in an order of its own.
	KeepsHead bool
}

// Request asks for the tokens that follow a list of tokens.
type Request struct {
	// ID names the request to the server.
	ID string
	// Adapter is the name of the adapter to draw with, see Pool.LoadAdapter; empty: none.
	Adapter string
	// Weights is the name of the whole weights to draw with, see Pool.AddWeights; empty: those that servers were
	// started with.
	Weights string
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
	// Value is its number (Facts.Values), Top the number of the likeliest token; NaN: the server has none. A logit may
	// be minus infinity.
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

// Server is one server of a Pool, as it was found when it joined.
type Server struct {
	config  Config
	dialect *dialect
	facts   Facts
	root    string    // the model that it was started with, by the name or the path that it reads
	version string    // its name for the weights of the probe's answer; empty: it says none
	numbers []float64 // those of the tokens that follow ProbeIDs: of all by id, or the largest
	http    *remotehttp.Client
}

// dialect is what differs between the kinds of server.
type dialect struct {
	// discover sets all facts but Values and Route.
	discover func(ctx context.Context, s *Server, f *Facts) error
	// routes are the paths of requests for tokens, the best first.
	routes []string
	// requestBody returns the body of a request for tokens, with top numbers of other tokens for each; -1: all.
	requestBody func(f Facts, vocabulary int, r *Request, top int) map[string]any
	// processedKind is what its numbers are if they depend on the temperature: Tempered or Processed.
	processedKind string
	// parseEvent returns the tokens of an event that follow the tokens of before.
	parseEvent func(f Facts, data []byte, before []int32) (event, error)
	// load and unload are the paths by which the server takes adapters while it runs, need what it must have for it.
	load, unload, need string
	// reload has the server load the whole weights of a folder, and call them name.
	reload func(ctx context.Context, s *Server, folder, name string) error
	// paused reports whether the server says that it is paused; nil: it has no route that says so.
	paused func(ctx context.Context, s *Server) bool
	// release makes the server drop a request whose stream is closed before its end; nil: it does so itself.
	release func(s *Server, id string)
}

var dialects = map[string]*dialect{VLLM: &vllm, SGLang: &sglang}

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

// newServer finds out the Facts of a server. An error that wraps ErrRefused says that the server cannot be used; after
// any other error it may not have started yet, and a retry may help.
func newServer(ctx context.Context, c Config, name string, http *remotehttp.Client) (*Server, error) {
	s := &Server{config: c, facts: Facts{Name: name, Adapters: true}, http: http, dialect: dialects[name]}
	if err := s.dialect.discover(ctx, s, &s.facts); err != nil {
		if routeClosed(err) {
			err = fmt.Errorf("%w%s", err, s.otherKind(ctx))
		}
		return nil, err
	}
	err := s.fingerprint(ctx)
	s.facts.Whole = s.facts.Whole && c.Whole && s.version != ""
	return s, err
}

// sameFacts returns an error if the server is not what the first server of its pool was, when it joined.
func (s *Server) sameFacts(first *Server) error {
	was, is := first.facts, s.facts
	if was.Model = is.Model; was != is { // each has a name of its own for the model
		return fmt.Errorf("it is release %s with %s numbers in %s by %s, %d tokens; the lane was announced with "+
			"release %s, %s in %s by %s, %d tokens%s: restart it, or the sampler", is.Version, is.Values,
			is.Precision, is.Route,
			is.MaxTokens, was.Version, was.Values, was.Precision, was.Route, was.MaxTokens, weightsDiffer(was, is))
	}
	return nil
}

// weightsDiffer says which of two servers takes which weights.
func weightsDiffer(was, is Facts) string {
	if was.Whole == is.Whole && was.Adapters == is.Adapters {
		return ""
	}
	return fmt.Sprintf("; it takes whole weights: %v, adapters: %v, and the lane was announced with %v, %v", is.Whole,
		is.Adapters, was.Whole, was.Adapters)
}

// sameNumbers returns an error if the server has other weights than the first server of its pool, by its numbers for a
// fixed prompt. The pool then leaves this server out and uses the others.
func (s *Server) sameNumbers(first []float64) error {
	if len(s.numbers) != len(first) {
		return fmt.Errorf("it gives %d numbers for a token, the other servers %d: start it with their options "+
			"(--max-logprobs)", len(s.numbers), len(first))
	}
	off := 0.0
	for i := range s.numbers {
		off += math.Abs(s.numbers[i]-first[i]) / float64(len(s.numbers))
	}
	if most := numberTolerance[s.facts.Precision]; !(off <= most) {
		return fmt.Errorf("its numbers for a fixed prompt are %.2g away from those of the other servers, of which %g "+
			"passes: it has other weights; restart it with the same", off, most)
	}
	return nil
}

// numberTolerance is how far numbers of the same weights may be apart, on the average, by Facts.Precision: servers of
// other machines add up in another order.
var numberTolerance = map[string]float64{"fp32": 1e-3, "fp16": 0.02, "bf16": 0.2, "": 0.2}

// otherKind says which other kind of server answers in the place of the one that is asked for.
func (s *Server) otherKind(ctx context.Context) string {
	for name, d := range dialects {
		if name != s.facts.Name && d.discover(ctx, s, &Facts{}) == nil {
			return fmt.Sprintf("; it is a server of %s: name it %s=%s", name, name, s.http.Base)
		}
	}
	return noServer()
}

// noServer says that what answers is not a server of a supported kind.
func noServer() string {
	return fmt.Sprintf("; it is no server of %s: is its port right?", strings.Join(Names(), " or "))
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
	if s.facts.Values != Logits {
		for _, v := range []*float32{&out.Value, &out.Top} {
			if math.IsInf(float64(*v), -1) {
				*v = float32(math.NaN())
			}
		}
	}
	if s.facts.Values == Logits {
		out.Logits = make([]float32, s.config.Vocabulary)
		for i, id := range t.ids {
			out.Logits[id] = float32(t.of[i])
		}
	}
	return out
}
