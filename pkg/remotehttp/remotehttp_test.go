package remotehttp_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/pool"
	"github.com/meander-rl/meander/pkg/remotehttp"
)

// Addresses of servers, and what is wrong with others.
func TestSplitAll(t *testing.T) {
	t.Parallel()
	name, bases, err := remotehttp.SplitAll("vllm=http://a:1/,https://b:2/x")
	if err != nil || name != "vllm" || !slices.Equal(bases, []string{"http://a:1", "https://b:2/x"}) {
		t.Errorf("%s, %v, %v", name, bases, err)
	}
	for address, says := range map[string]string{
		"vllm=a:1": "must be NAME=URL", "vllm=http://": "must be NAME=URL", "vllm=http://u:p@a": "must be NAME=URL",
		"vllm=http://a?x=1": "must be NAME=URL", "vllm=http://a,http://a/": "names http://a twice",
	} {
		if _, _, err := remotehttp.SplitAll(address); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v; want %q", address, err, says)
		}
	}
}

// The classes of answers, and the reasons that servers give in their several forms.
func TestClient_Statuses(t *testing.T) {
	t.Parallel()
	status, said := http.StatusOK, ""
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer key" {
			status = http.StatusUnauthorized
		}
		w.WriteHeader(status)
		fmt.Fprint(w, said)
	}))
	defer s.Close()
	c := remotehttp.New(s.URL, "key", time.Minute)
	defer c.Close()
	for _, tt := range []struct {
		status int
		said   string
		class  error
		says   string
	}{
		{400, `{"error":{"message":"bad \n request"}}`, pool.ErrRefused, "bad request"},
		{404, `{"message":"none"}`, pool.ErrRefused, "none"},
		{422, `{"detail":[{"loc":1}]}`, pool.ErrRefused, `[{"loc":1}]`},
		{429, `{"error":"slow down"}`, pool.ErrOverloaded, "slow down"},
		{503, `{"detail":"busy"}`, pool.ErrOverloaded, "busy"},
		{503, `{"error_message":"Engine is PAUSED"}`, pool.ErrPaused, "Engine is PAUSED"},
		{500, "", nil, "no reason given"},
		{200, `{"a":1}{`, remotehttp.ErrGarbage, ""},
		{200, `{"a":1}`, nil, ""},
	} {
		status, said = tt.status, tt.said
		var v struct{ A int }
		err := c.Ask(t.Context(), http.MethodGet, "/x", nil, &v)
		for _, class := range []error{pool.ErrRefused, pool.ErrOverloaded, pool.ErrPaused, remotehttp.ErrGarbage} {
			if errors.Is(err, class) != (class == tt.class) { //nolint:errorlint // the classes themselves
				t.Errorf("%d %s: %v; want %v", tt.status, tt.said, err, tt.class)
			}
		}
		switch {
		case tt.status == http.StatusOK && tt.class == nil:
			if err != nil || v.A != 1 {
				t.Errorf("%+v, %v", v, err)
			}
		case err == nil || !strings.Contains(err.Error(), tt.says):
			t.Errorf("%v; want %q", err, tt.says)
		case tt.status != http.StatusOK && remotehttp.Answered(err) != tt.status:
			t.Errorf("status %d", remotehttp.Answered(err))
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Health(ctx); err == nil || remotehttp.Answered(err) != 0 {
		t.Errorf("%v; want an error that is no answer", err)
	}
}
