package remotelm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/remotelm"
	"github.com/meander-rl/meander/pkg/remotelm/remotelmtest"
)

// The recorded answer: 305 and the end of a turn.
var recordedIDs = []int32{18, 15, 20, 306}

func dial(t *testing.T, s *remotelmtest.Server, patience time.Duration) *remotelm.Pool {
	t.Helper()
	got, err := remotelm.Dial(t.Context(), remotelm.Config{
		Server: s.Engine(), Vocabulary: 320, ProbeIDs: []int32{1, 2}, Patience: patience, Pause: time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(got.Close)
	return got
}

// told is what a stream came to.
type told struct {
	ids     []int32
	tokens  []remotelm.Token
	chunks  int
	finish  string
	weights []remotelm.Span
	resumed int
	err     error
}

func draw(ctx context.Context, s *remotelm.Pool) told { return drawWith(ctx, s, "") }

func drawWith(ctx context.Context, s *remotelm.Pool, weights string) (all told) {
	r := remotelm.Request{
		ID: "r", IDs: []int32{305, 263}, MaxTokens: 8, Stop: []int32{306}, Temperature: 1, TopP: 1, Seed: 3,
		Weights: weights,
	}
	for c, err := range s.Stream(ctx, r) {
		if err != nil {
			all.err = err
			return all
		}
		all.chunks++
		for _, t := range c.Tokens {
			all.ids, all.tokens = append(all.ids, t.ID), append(all.tokens, t)
		}
		all.finish, all.weights, all.resumed = c.Finish, c.Weights, c.Resumed
	}
	return all
}

// What the numbers are is found out, and each route's form is read, whole or byte by byte.
func TestServer_Streams(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		mode, values, version string
	}{
		{remotelmtest.LogProbs, remotelm.Raw, "0.32.0"},
		{remotelmtest.Logits, remotelm.Logits, "0.32.0"},
		{remotelmtest.Completions, remotelm.Raw, "0.32.0"},
		{remotelmtest.SGLang, remotelm.Tempered, "0.5.23"},
	} {
		t.Run(c.mode, func(t *testing.T) {
			t.Parallel()
			s := remotelmtest.New(t, c.mode)
			streams := [][]byte{s.Stream()}
			if c.mode == remotelmtest.SGLang {
				streams = append(streams, remotelmtest.Recorded(t, "sglang-delta.sse"))
			}
			server := dial(t, s, time.Minute)
			if f := server.Facts(); f.Values != c.values || f.Version != c.version || f.MaxTokens != 512 {
				t.Errorf("facts %+v; want %s, %s, 512 tokens", f, c.values, c.version)
			}
			for _, stream := range streams {
				for _, how := range []remotelmtest.Answer{remotelmtest.Whole(stream), remotelmtest.Bytewise(stream)} {
					s.Then(how)
					got := draw(t.Context(), server)
					if got.err != nil || !slices.Equal(got.ids, recordedIDs) || got.finish != remotelm.Stop ||
						got.chunks != 4 || got.resumed != 0 {
						t.Fatalf("drew %+v; want %v in 4 chunks, and stop", got, recordedIDs)
					}
					for i, token := range got.tokens {
						switch {
						case c.values == remotelm.Logits:
							if len(token.Logits) != 320 || token.Logits[token.ID] != token.Value ||
								slices.Max(token.Logits) != token.Top {
								t.Errorf("token %d: %d logits, its own %g", i, len(token.Logits), token.Value)
							}
						case token.Value > 0 || token.Top < token.Value || token.Logits != nil:
							t.Errorf("token %d: %+v", i, token)
						}
					}
				}
			}
			asked := s.Asked()[0]
			if ids := fmt.Sprint(asked["token_ids"], asked["prompt"], asked["input_ids"]); !strings.Contains(ids,
				"[305 263]") {
				t.Errorf("asked with %v; must be with ids", asked)
			}
			params, _ := asked["sampling_params"].(map[string]any)
			if c.mode == remotelmtest.SGLang && (params["ignore_eos"] == true ||
				fmt.Sprint(params["stop_token_ids"]) != "[306]") {
				t.Errorf("asked with %v; SGLang stops at no token with ignore_eos", params)
			}
		})
	}
}

// Whether numbers are log-probs or logits follows from the numbers of all tokens, and the element type of the logits
// from their spacing, whatever the logits are; a server that gives fewer numbers is found out by their sum.
func TestDial_FindsOutNumbers(t *testing.T) {
	t.Parallel()
	lowered := func(by float64) func([]float64) {
		return func(z []float64) {
			for i := range z {
				z[i] -= by
			}
		}
	}
	rounded := func(bits int) func([]float64) { // to that many bits of mantissa, about a mean of 0
		return func(z []float64) {
			for i := range z {
				fraction, exponent := math.Frexp(z[i] + 15)
				z[i] = math.Ldexp(math.RoundToEven(math.Ldexp(fraction, bits)), exponent-bits)
			}
		}
	}
	for name, c := range map[string]struct {
		mode              string
		row               func([]float64)
		most              int
		values, precision string // no values: refused
	}{
		"logits":                     {remotelmtest.Logits, nil, 0, remotelm.Logits, "fp32"},
		"low logits":                 {remotelmtest.Logits, lowered(40), 0, remotelm.Logits, "fp32"},
		"logits near log-probs":      {remotelmtest.Logits, lowered(9), 0, remotelm.Logits, "fp32"},
		"logits in bf16":             {remotelmtest.Logits, rounded(8), 0, remotelm.Logits, "bf16"},
		"log-probs in bf16":          {remotelmtest.LogProbs, rounded(8), 0, remotelm.Raw, "bf16"},
		"log-probs in fp16":          {remotelmtest.LogProbs, rounded(11), 0, remotelm.Raw, "fp16"},
		"SGLang in bf16":             {remotelmtest.SGLang, rounded(8), 0, remotelm.Tempered, "bf16"},
		"log-probs, 20 at most":      {remotelmtest.LogProbs, nil, 20, remotelm.Raw, "fp32"},
		"20 in bf16":                 {remotelmtest.LogProbs, rounded(8), 20, remotelm.Raw, "bf16"},
		"log-probs, 5 at most":       {remotelmtest.Completions, nil, 5, remotelm.Raw, ""},
		"logits, 20 at most":         {remotelmtest.Logits, nil, 20, "", ""},
		"low logits, 20 at most":     {remotelmtest.Logits, lowered(40), 20, "", ""},
		"nearly log-probs, too many": {remotelmtest.Logits, lowered(-3), 20, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := remotelmtest.New(t, c.mode)
			s.Row, s.MaxTop = c.row, c.most
			got, err := remotelm.Dial(t.Context(), remotelm.Config{
				Server: s.Engine(), Vocabulary: 320, ProbeIDs: []int32{1, 2},
			})
			if err != nil {
				if c.values != "" || !errors.Is(err, remotelm.ErrRefused) || !strings.Contains(err.Error(),
					"--max-logprobs -1") {
					t.Fatalf("%v; want %q", err, c.values)
				}
				return
			}
			defer got.Close()
			if f := got.Facts(); f.Values != c.values || f.Precision != c.precision {
				t.Errorf("%s in %q; want %s in %q", f.Values, f.Precision, c.values, c.precision)
			}
		})
	}
}

// The versions of the weights are told of the tokens that they drew.
func TestServer_Weights(t *testing.T) {
	t.Parallel()
	for mode, want := range map[string][]remotelm.Span{
		remotelmtest.LogProbs: {{Version: "default", End: 4}},
		remotelmtest.SGLang:   {{Version: "v1", End: 2}, {Version: "v2", Begin: 2, End: 4}},
	} {
		if got := draw(t.Context(), dial(t, remotelmtest.New(t, mode), time.Minute)); !slices.Equal(got.weights, want) {
			t.Errorf("%s: weights %+v, want %+v", mode, got.weights, want)
		}
	}
}

// An answer that breaks off is gone on with from the tokens that there are, whatever it broke off by.
func TestServer_GoesOn(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]func(s *remotelmtest.Server) remotelmtest.Answer{
		"disconnect": func(s *remotelmtest.Server) remotelmtest.Answer { return remotelmtest.Cut(s.Stream(), 2) },
		"hang":       func(s *remotelmtest.Server) remotelmtest.Answer { return s.Hang(s.Stream(), 2) },
		"abort": func(s *remotelmtest.Server) remotelmtest.Answer {
			e := remotelmtest.Events(s.Stream())[:2]
			return remotelmtest.Whole(append(e[0], bytes.Replace(e[1], []byte(`"finish_reason":null`), []byte(`"finish_reason":"abort"`), 1)...))
		},
		"end without a word": func(s *remotelmtest.Server) remotelmtest.Answer {
			return remotelmtest.Whole(bytes.Join(remotelmtest.Events(s.Stream())[:2], nil))
		},
		"garbage": func(s *remotelmtest.Server) remotelmtest.Answer {
			return remotelmtest.Whole(append(bytes.Join(remotelmtest.Events(s.Stream())[:2], nil),
				"data: {\"choices\":[{\"index\":\n\n"...))
		},
		"an id that is none": func(s *remotelmtest.Server) remotelmtest.Answer {
			e := remotelmtest.Events(s.Stream())
			return remotelmtest.Whole(append(append(e[0], e[1]...), bytes.ReplaceAll(e[2], []byte(`:20,`), []byte(`:320,`))...))
		},
		"a log-prob that is none": func(s *remotelmtest.Server) remotelmtest.Answer {
			e := remotelmtest.Events(s.Stream())
			return remotelmtest.Whole(append(append(e[0], e[1]...), bytes.ReplaceAll(e[2], []byte(`"logprob":-`), []byte(`"logprob":`))...))
		},
		"a number left out": func(s *remotelmtest.Server) remotelmtest.Answer {
			e := remotelmtest.Events(s.Stream())
			return remotelmtest.Whole(append(append(e[0], e[1]...), bytes.Replace(e[2], []byte(`"token_id":20,"logprob"`), []byte(`"token_id":20,"nothing"`), 1)...))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := remotelmtest.New(t, remotelmtest.LogProbs)
			s.Then(broken(s), remotelmtest.Fail(503, "busy"), remotelmtest.Whole(remotelmtest.Tail(s.Stream(), 2)))
			got := draw(t.Context(), dial(t, s, time.Second))
			if got.err != nil || !slices.Equal(got.ids, recordedIDs) || got.finish != remotelm.Stop ||
				got.resumed != 2 {
				t.Fatalf("drew %+v; want %v, resumed twice", got, recordedIDs)
			}
			asked := s.Asked()
			sampling := func(i int) map[string]any { return asked[i]["sampling_params"].(map[string]any) }
			if last := len(asked) - 1; fmt.Sprint(asked[last]["token_ids"]) != "[305 263 18 15]" ||
				sampling(last)["max_tokens"] != 6.0 || sampling(last)["seed"] == sampling(0)["seed"] {
				t.Errorf("went on with %v", asked[last])
			}
		})
	}
}

// with is an event of one token with a number in this form.
func with(number string) remotelmtest.Answer {
	const event = `data: {"choices":[{"index":0,"token_ids":[18],"logprobs":{"content":[{"token_id":18,%s}]}}]}`
	return remotelmtest.Whole(fmt.Appendf(nil, event+"\n\n", number))
}

// What cannot pass ends at once, what may pass after some tries; both by name.
func TestServer_GivesUp(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer remotelmtest.Answer
		tries  int
		is     error
		says   string
	}{
		"refused":     {remotelmtest.Fail(400, `{"error":{"message":"too long","code":400}}`), 1, remotelm.ErrRefused, "too long"},
		"no model":    {remotelmtest.Fail(404, `{"error":{"message":"no such model","code":404}}`), 1, remotelm.ErrRefused, "no such model"},
		"in stream":   {remotelmtest.Whole([]byte("data: {\"error\":{\"message\":\"out of vocabulary\",\"code\":400}}\n\ndata: [DONE]\n\n")), 1, remotelm.ErrRefused, "out of vocabulary"},
		"busy":        {remotelmtest.Fail(503, "busy"), 5, nil, "503"},
		"full":        {remotelmtest.Fail(429, "later"), 5, nil, "429"},
		"html":        {remotelmtest.Whole([]byte("<html>\n")), 5, nil, "breaks off"},
		"large":       {remotelmtest.Whole(append([]byte("data: "), bytes.Repeat([]byte("x"), 4<<20)...)), 5, remotelm.ErrGarbage, "bytes"},
		"no stream":   {remotelmtest.Whole([]byte(`{"object":"error","message":"out of memory"}`)), 5, remotelm.ErrGarbage, "out of memory"},
		"no finish":   {remotelmtest.Whole([]byte("data: [DONE]\n\n")), 5, nil, "breaks off"},
		"a new word":  {remotelmtest.Whole([]byte(`data: {"choices":[{"index":0,"token_ids":[],"finish_reason":"repetition","logprobs":{"content":[]}}]}` + "\n\n")), 5, remotelm.ErrGarbage, "repetition"},
		"half a pair": {with("\"text\":\"\\ud83d\",\"logprob\":-1"), 5, remotelm.ErrGarbage, "half a surrogate pair"},
		"null":        {with(`"logprob":null`), 5, remotelm.ErrGarbage, "no number"},
		"infinity":    {with(`"logprob":"-Infinity"`), 5, remotelm.ErrGarbage, "string"},
		"no JSON":     {with(`"logprob":NaN`), 5, remotelm.ErrGarbage, "'N'"},
		"above 0":     {with(`"logprob":0.5`), 5, remotelm.ErrGarbage, "a log-prob of 0.5"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := remotelmtest.New(t, remotelmtest.LogProbs, c.answer)
			got := draw(t.Context(), dial(t, s, time.Minute))
			if got.err == nil || c.is != nil && !errors.Is(got.err, c.is) ||
				!strings.Contains(got.err.Error(), c.says) || len(s.Asked()) != c.tries {
				t.Errorf("%v after %d tries; want %d, and %q", got.err, len(s.Asked()), c.tries, c.says)
			}
		})
	}
}

// SGLang repeats what was: what it repeats otherwise, or takes back, is no answer.
func TestServer_Cumulative(t *testing.T) {
	t.Parallel()
	stream := remotelmtest.Recorded(t, "sglang-cumulative.sse")
	e := remotelmtest.Events(stream)
	for name, c := range map[string]struct {
		second  []byte
		resumed int
	}{
		"once more":        {e[1], 0}, // as after a retraction
		"other tokens":     {bytes.Replace(e[2], []byte("[18, 15"), []byte("[18, 16"), 1), 1},
		"fewer":            {e[0], 1},
		"ids of one alone": {bytes.Replace(e[2], []byte("[18, 15, 20]"), []byte("[18, 20]"), 1), 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := remotelmtest.New(t, remotelmtest.SGLang)
			broken := bytes.Join([][]byte{e[0], e[1], c.second, e[2], e[3]}, nil)
			delta := remotelmtest.Recorded(t, "sglang-delta.sse")
			s.Then(remotelmtest.Whole(broken), remotelmtest.Whole(renumbered(remotelmtest.Tail(delta, 2))))
			got := draw(t.Context(), dial(t, s, time.Minute))
			if got.err != nil || !slices.Equal(got.ids, recordedIDs) || got.resumed != c.resumed {
				t.Errorf("drew %+v, want %v, resumed %d", got, recordedIDs, c.resumed)
			}
		})
	}
}

// renumbered is the third and the fourth event of a delta stream as the first and the second of another.
func renumbered(tail []byte) []byte {
	tail = bytes.Replace(tail, []byte(`"completion_tokens": 3`), []byte(`"completion_tokens": 1`), 1)
	return bytes.Replace(tail, []byte(`"completion_tokens": 4`), []byte(`"completion_tokens": 2`), 1)
}

// A caller that breaks off, or whose context ends, waits for no one.
func TestServer_BreaksOff(t *testing.T) {
	t.Parallel()
	s := remotelmtest.New(t, remotelmtest.LogProbs)
	s.Then(s.Hang(s.Stream(), 1))
	server := dial(t, s, time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r := remotelm.Request{ID: "r", IDs: []int32{305}, MaxTokens: 8, Temperature: 1, TopP: 1}
	for c, err := range server.Stream(ctx, r) {
		if err != nil {
			if !errors.Is(err, context.Canceled) {
				t.Errorf("ended with %v", err)
			}
			break
		}
		if len(c.Tokens) != 1 {
			t.Errorf("%d tokens, want 1", len(c.Tokens))
		}
		cancel()
	}
	for _, err := range server.Stream(t.Context(), r) {
		if err != nil {
			t.Error(err)
		}
		break
	}
}

// What a server cannot be used for is said when it is found out, with what to do; one that is not up may come.
func TestDial_Refuses(t *testing.T) {
	t.Parallel()
	for server, says := range map[string]string{
		"": "NAME=URL", "llama=http://127.0.0.1:1": "vllm, sglang", "vllm=127.0.0.1:8000": "URL", "vllm=http://u:p@127.0.0.1": "URL",
	} {
		if _, err := remotelm.Dial(t.Context(), remotelm.Config{Server: server}); !errors.Is(err,
			remotelm.ErrRefused) || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v; want %q", server, err, says)
		}
	}
	s := remotelmtest.New(t, remotelmtest.Logits)
	if _, err := remotelm.Dial(t.Context(), remotelm.Config{
		Server: s.Engine(), Vocabulary: 321, ProbeIDs: []int32{1},
	}); !errors.Is(err, remotelm.ErrRefused) || !strings.Contains(err.Error(), "321") {
		t.Errorf("another vocabulary: %v", err)
	}
	s.Down(true)
	if _, err := remotelm.Dial(t.Context(), remotelm.Config{
		Server: s.Engine(), Vocabulary: 320, ProbeIDs: []int32{1},
	}); err == nil || errors.Is(err, remotelm.ErrRefused) ||
		!strings.Contains(err.Error(), "the engine is dead") {
		t.Errorf("a server that is down: %v; must not be refused for good", err)
	}
}

// vLLM writes -9999.0 for minus infinity: a drawn token then has no number, and one among the likeliest is not there. A
// logit is minus infinity.
func TestServer_LeastNumberOfVLLM(t *testing.T) {
	t.Parallel()
	for mode, c := range map[string]struct{ drawn, top string }{
		remotelmtest.LogProbs:    {`"token_id":15,"logprob":-0.11648700386285782`, `"token_id":24,"logprob":-2.932673454284668`},
		remotelmtest.Completions: {`[-0.11648700386285782]`, `"token_id:24":-2.932673454284668`},
	} {
		s := remotelmtest.New(t, mode)
		number := regexp.MustCompile(`-[0-9.]+(\]?)$`)
		stream := s.Stream()
		for _, of := range []string{c.drawn, c.top} {
			if !bytes.Contains(stream, []byte(of)) {
				t.Fatalf("%s: %s is not in the stream", mode, of)
			}
			stream = bytes.ReplaceAll(stream, []byte(of), number.ReplaceAll([]byte(of), []byte("-9999.0$1")))
		}
		s.Then(remotelmtest.Whole(stream))
		got := draw(t.Context(), dial(t, s, time.Minute))
		if got.err != nil || !slices.Equal(got.ids, recordedIDs) {
			t.Fatalf("%s: drew %+v", mode, got)
		}
		for i, token := range got.tokens {
			if none := math.IsNaN(float64(token.Value)); none != (i == 1) || token.Value < -9000 || token.Top < -9000 {
				t.Errorf("%s: token %d: %g, the likeliest %g", mode, i, token.Value, token.Top)
			}
		}
	}
}
