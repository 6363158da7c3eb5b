// Package remotelm speaks to HTTP servers of language models, vLLM and SGLang: token ids go out, and token ids
// come back while they are drawn, with the numbers that the server gives of each. Ids are never guessed from text.
//
// Both servers stream, one in deltas and one with everything so far in each event; both end streams early, for
// updates of their weights, or because they die. A Stream is one run of tokens nonetheless: what breaks off is asked
// for again from the tokens that there are, a bounded number of times. Whatever the server says is checked: a
// number that cannot be, an id that the vocabulary does not have, or an event that is too large is an error.
package remotelm

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// Names of the servers that are known.
const (
	VLLM   = "vllm"
	SGLang = "sglang"
)

// Names lists them.
func Names() []string { return []string{VLLM, SGLang} }

// What the number is that a server gives of a token.
const (
	Raw       = "raw"       // its log-prob before temperature and filters
	Tempered  = "tempered"  // its log-prob after temperature, before filters
	Processed = "processed" // its log-prob after both
	Logits    = "logits"    // its logit as the model gives it; with it come those of all tokens
)

// Errors of a server, besides those of a connection. ErrRefused is wrapped by what comes again however often it is
// tried: the request, or how the server was started, has to change. ErrSilent, ErrGarbage and ErrAborted may pass.
var (
	ErrRefused = errors.New("refused by the server")
	ErrSilent  = errors.New("the server says nothing")
	ErrGarbage = errors.New("not an answer")
	ErrAborted = errors.New("aborted by the server")
	errCut     = errors.New("the answer breaks off")
)

// Config says where a server is, and what it must serve.
type Config struct {
	// Server is NAME=URL: vllm=http://127.0.0.1:8000.
	Server string
	// Vocabulary is V, the number of logits of a token.
	Vocabulary int
	// Probe are ids that the server is asked to go on from, to see what its numbers are.
	Probe []int32
	// Patience is how long the server may say nothing of a request before that is asked again; 0: a minute.
	Patience time.Duration
	// Pause is before an answer that broke off is asked for again; twice as long the next time, unless there were tokens; 0: 200 ms.
	Pause time.Duration
	// Key, where there is one, is sent as a bearer token.
	Key string
	// Resumed hears why an answer that broke off is asked for again; nil: nobody does.
	Resumed func(err error)
}

// Parse tells the name and the address of a server.
func Parse(server string) (name, base string, err error) {
	name, base, _ = strings.Cut(server, "=")
	if !slices.Contains(Names(), name) {
		return "", "", fmt.Errorf("%q; must be NAME=URL, NAME one of %s", server, strings.Join(Names(), ", "))
	}
	u, err := url.Parse(base)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return "", "", fmt.Errorf("%q; must be NAME=URL, URL that of a server, such as %s=http://127.0.0.1:8000", server, name)
	}
	return name, strings.TrimRight(base, "/"), nil
}

// Facts are what a server is found to be.
type Facts struct {
	// Name is the kind of server, Version its release, Model what it calls the model that it serves.
	Name, Version, Model string
	// Values is what the number is that it gives of a token: Raw, Tempered, Processed or Logits.
	Values string
	// MaxTokens bounds a prompt together with its answer; 0: the server does not say.
	MaxTokens int
	// Route is where tokens are asked for.
	Route string
}

// Request asks for the tokens behind some others.
type Request struct {
	// ID names the request to the server.
	ID string
	// IDs are what there is, at least one.
	IDs []int32
	// MaxTokens is the most to draw, at least one. The tokens of Stop end it; they are drawn like others.
	MaxTokens int
	Stop      []int32
	// Temperature 0 takes the likeliest; TopK 0, TopP 1 and MinP 0 leave all tokens to draw from.
	Temperature, TopP, MinP float64
	TopK                    int
	// Seed is for the server's generator.
	Seed uint64
}

// Token is one that a server drew.
type Token struct {
	ID int32
	// Value is its number, and Top that of the likeliest.
	Value, Top float32
	// Logits [V] are those that it was drawn from, where Values is Logits.
	Logits []float32
}

// Why a server drew no more tokens.
const (
	Stop   = "stop"
	Length = "length"

	aborted = "abort" // the server's own word for what it breaks off
)

// Chunk is some tokens, in order, and, in the last of a stream, why there are no more.
type Chunk struct {
	Tokens []Token
	Finish string
	// Weights are the versions of the weights by the server's own names, as far as it has told them: of the tokens
	// of the stream, Begin to End.
	Weights []Span
	// Resumed is how often the answer has broken off so far, and been gone on with.
	Resumed int
}

// Span is the tokens [Begin, End) that were drawn with one version of the weights.
type Span struct {
	Version    string
	Begin, End int
}

// Server is one that was found to be what it must be. It is safe for concurrent use.
type Server struct {
	config  Config
	dialect dialect
	facts   Facts
	client  *http.Client
	base    string
}

// dialect is what one kind of server differs in from others.
type dialect interface {
	// find fills in facts but for Values and Route.
	find(ctx context.Context, s *Server, f *Facts) error
	// routes are where tokens can be asked for, the best first.
	routes() []string
	// body is that of a request for tokens; top is how many numbers of each, beside its own, are asked for, -1: all.
	body(f Facts, r *Request, top int) map[string]any
	// after is what its numbers are that depend on the temperature: Tempered or Processed.
	after() string
	// read takes an event: the tokens behind those of before.
	read(f Facts, data []byte, before []int32) (event, error)
	// release has the server let go of a request whose stream is closed before its end.
	release(s *Server, id string)
}

// event is what a server says at once.
type event struct {
	tokens  []scored
	finish  string // as the server calls it
	weights []Span // of the tokens of this request
}

// scored is a token with the numbers of others, in the server's order.
type scored struct {
	id    int32
	value float64
	ids   []int32
	of    []float64
}

// Dial finds out what a server is. An error that wraps ErrRefused says that it is not what it must be; else it may
// not be up yet.
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
	s := &Server{config: c, base: base, facts: Facts{Name: name}, client: &http.Client{Transport: &http.Transport{
		Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: 64, ResponseHeaderTimeout: c.Patience,
	}}}
	s.dialect = vllm{}
	if name == SGLang {
		s.dialect = sglang{}
	}
	if err := s.dialect.find(ctx, s, &s.facts); err != nil {
		return nil, fmt.Errorf("%s: %w", s, err)
	}
	if err := s.fingerprint(ctx); err != nil {
		return nil, fmt.Errorf("%s: %w", s, err)
	}
	return s, nil
}

// String names the server.
func (s *Server) String() string { return s.facts.Name + " at " + s.base }

// Facts are those that were found.
func (s *Server) Facts() Facts { return s.facts }

// Close closes connections that nobody uses.
func (s *Server) Close() { s.client.CloseIdleConnections() }

// tries is how often an answer that broke off is asked for again without a token more.
const tries = 4

// Stream draws tokens until they end, ctx does, or the caller breaks off; then the server is told to. An error ends it, and
// says what there is to do where it wraps ErrRefused. What breaks off is gone on with from the tokens there are, with
// another seed, as a server that comes back has no other way to.
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
			err := s.generate(ctx, next, s.top(), func(e event) bool {
				c := Chunk{Resumed: int(again), Weights: append(slices.Clone(weights), moved(e.weights, drawn)...)}
				for i := range e.tokens {
					c.Tokens = append(c.Tokens, s.token(&e.tokens[i]))
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
			if r.MaxTokens == len(r.IDs)-first { // all there, but for the word that they are
				yield(Chunk{Finish: Length, Weights: weights, Resumed: int(again)}, nil)
				return
			}
			if failed > tries {
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

// seedOf is that of a try: another for each, so that no noise comes twice, and one that any server takes.
func seedOf(seed, again uint64) uint64 {
	return (seed ^ seed>>53 + again*0x9e3779b97f4a7c15) & (1<<53 - 1)
}

func moved(spans []Span, by int) []Span {
	out := slices.Clone(spans)
	for i := range out {
		out[i].Begin, out[i].End = out[i].Begin+by, out[i].End+by
	}
	return out
}

// top is how many numbers of each token are asked for, beside its own.
func (s *Server) top() int {
	if s.facts.Values == Logits {
		return -1
	}
	return fewTop
}

// token is what callers get of one.
func (s *Server) token(t *scored) Token {
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
