// Package ui serves 'meander ui': one page that shows what a pipeline does, while it does it. The page is embedded:
// HTML, CSS and JavaScript modules in the folder page, without a build step. It gets its data from a small JSON API and
// from server-sent events: the models of package view. It writes nothing, unless Config.Admin lets it store verdicts
// and replay dead letters.
//
// What comes from the stream is text for the page: it is sent as JSON, and the page never reads it as HTML. Images have
// their content type, and browsers are told to execute nothing (a content security policy, nosniff). Only requests with
// a known Host are answered, so that no other site reaches a page on this machine through a name of its own. With a
// token, only browsers that have given it are answered; the page does what its connection to the server may.
package ui

import (
	"bytes"
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
)

//go:embed page
var page embed.FS

// Config are the settings of a page.
type Config struct {
	Listen string   `key:"listen" help:"address of the page, host:port; beyond this machine it needs a token in MEANDER_UI_TOKEN"`
	Hosts  []string `key:"host" help:"name by which browsers reach the page, besides localhost and addresses in numbers"`
	Admin  bool     `key:"admin" help:"let the page give verdicts, tag, annotate and remove runs, and replay or drop dead letters"`
	// Token is what browsers must give, see signIn; empty: nothing.
	Token string `key:"-"`
	// Where names the server of the pipeline for people.
	Where string `key:"-"`
	// Piece returns the text of a token; nil: the page shows numbers.
	Piece func(id int32) string `key:"-"`
	// Again says how a run is made again; nil: the page does not say it.
	Again func(schemas.Run, []view.Given, bool) *view.Again `key:"-"`
	// Doctor checks the whole pipeline and returns the findings of package doctor; nil: the page makes no checks.
	Doctor func(context.Context) any `key:"-"`
}

// DefaultConfig returns settings for a page on this machine.
func DefaultConfig() Config { return Config{Listen: "127.0.0.1:4280"} }

// Validate returns what is wrong with the settings.
func (c Config) Validate() error {
	host, _, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return fmt.Errorf("listen: %q; must be host:port, such as 127.0.0.1:4280", c.Listen)
	}
	if c.Token == "" && !isLoopback(host) {
		return fmt.Errorf("listen: %q; others reach it there, so set a token in MEANDER_UI_TOKEN, or use 127.0.0.1",
			c.Listen)
	}
	for _, name := range c.Hosts {
		if name == "" || strings.ContainsAny(name, "/: ") {
			return fmt.Errorf("host: %q; must be a name such as gpu-1.example.org, without http:// and without a port",
				name)
		}
	}
	return nil
}

// isLoopback reports whether only this machine reaches a host.
func isLoopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}

const (
	// maxReads is how many questions to the server run at once, maxStreams how many pages follow events.
	maxReads, maxStreams = 16, 64
	// readTimeout bounds one question, writeTimeout one answer to a slow browser.
	readTimeout, writeTimeout = 30 * time.Second, time.Minute
)

// server is one page.
type server struct {
	cfg     Config
	bus     *bus.Bus
	client  *client.Client
	log     zerolog.Logger
	view    *view.Reader
	reads   chan struct{}
	streams chan struct{}

	findings view.Shared[*checked]
	ctx      context.Context // of the server
	sweeping atomic.Bool
	sweeps   sync.WaitGroup
}

// Serve serves the page on b until ctx ends. listening is called with the page's address once it answers. It fails if
// the address cannot be had.
func Serve(ctx context.Context, b *bus.Bus, c Config, log zerolog.Logger, listening func(url string)) error {
	if err := c.Validate(); err != nil {
		return err
	}
	l, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return fmt.Errorf("listen: %w; must be an address of this machine that no process has", err)
	}
	s := &server{
		ctx: ctx, cfg: c, bus: b, client: client.New(b), log: log, reads: make(chan struct{}, maxReads),
		streams: make(chan struct{}, maxStreams),
		view: view.NewReader(ctx, b, view.Options{
			Advise: boot.Advise, Scarce: boot.Scarce, Piece: c.Piece, Again: c.Again, Log: log,
		}),
	}
	defer s.view.Close()
	defer s.sweeps.Wait() // it ends with ctx
	s.findings.Read = func(ctx context.Context) (*checked, error) {
		return &checked{c.Doctor(ctx), time.Now().UnixMilli()}, ctx.Err()
	}
	h := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 32 << 10,
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	context.AfterFunc(ctx, func() {
		late, done := context.WithTimeout(context.Background(), 5*time.Second)
		defer done()
		if h.Shutdown(late) != nil { // a browser that does not read
			_ = h.Close()
		}
	})
	address := l.Addr().String()
	if at, ok := l.Addr().(*net.TCPAddr); ok && at.IP.IsUnspecified() { // no browser goes to [::]
		address = net.JoinHostPort("localhost", strconv.Itoa(at.Port))
	}
	listening("http://" + address + "/")
	if err := h.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the page: %w", err)
	}
	return nil
}

// policy is the content security policy of the page: nothing from elsewhere, nothing inline.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; " +
	"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " +
	"require-trusted-types-for 'script'; trusted-types 'none'"

// handler answers all paths.
func (s *server) handler() http.Handler {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err) // the folder is embedded
	}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(files))
	for path, answer := range s.questions() {
		mux.HandleFunc("GET /api/"+path, s.answer(answer))
	}
	for path, change := range map[string]func(*query) (any, error){
		"runs/{run}/groups/{uid}/{sample}/verdict": s.giveVerdict,
		"runs/{run}/notes":                         s.setNotes,
		"runs/{run}/remove":                        s.removeRun,
		"dead/{id}/replay":                         s.replayLetter,
		"dead/{id}/drop":                           s.dropLetter,
	} {
		mux.HandleFunc("POST /api/"+path, s.answer(change))
	}
	mux.HandleFunc("GET /api/page", s.answerPage)
	mux.HandleFunc("GET /api/events", s.follow)
	mux.HandleFunc("GET /api/", func(w http.ResponseWriter, _ *http.Request) {
		writeError(w, http.StatusNotFound, "there is nothing at this address")
	})
	mux.HandleFunc("GET /media/{run}/{uid}/{sample}/{kind}", s.media)
	return s.guard(mux)
}

// guard lets requests through that come from a browser on a known host that has signed in, and sets the headers that
// keep what is shown from being executed.
func (s *server) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-cache")
		if !s.knows(r.Host) {
			writeError(w, http.StatusMisdirectedRequest, fmt.Sprintf(
				"the page is not served as %q; open it by its address, or start 'meander ui' with --host", r.Host))
			return
		}
		if s.cfg.Token != "" && (!s.signedIn(r) || givesToken(r)) {
			s.signIn(w, r)
			return
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead && !s.allows(w, r) {
			return
		}
		next.ServeHTTP(w, r)
	})
}

// knows reports whether a Host header is of this page. A site elsewhere can give its own name our address (DNS
// rebinding), but not a name or an address that is ours.
func (s *server) knows(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	return strings.EqualFold(host, "localhost") ||
		slices.ContainsFunc(s.cfg.Hosts, func(name string) bool { return strings.EqualFold(name, host) })
}

// requestError is an error with an HTTP status, for the person at the page.
type requestError struct {
	status int
	says   string
}

func (e *requestError) Error() string { return e.says }

// answer returns the handler of a question whose answer is JSON. Questions are bounded in number and time.
func (s *server) answer(read func(q *query) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, done := context.WithTimeout(r.Context(), readTimeout)
		defer done()
		release, err := s.admit(ctx)
		var v any
		if err == nil {
			q := &query{Request: r.WithContext(ctx), refuse: done}
			v, err = read(q)
			err = cmp.Or(q.err, err)
			release()
		}
		if err != nil {
			s.fail(w, r, err)
			return
		}
		data, err := json.Marshal(v)
		if err != nil {
			s.fail(w, r, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		s.write(w, data)
	}
}

// lost returns the answer while the server of the pipeline is away.
func (s *server) lost() *requestError {
	where := ""
	if s.cfg.Where != "" {
		where = " at " + s.cfg.Where
	}
	return &requestError{
		http.StatusServiceUnavailable,
		"Lost the server" + where + "; retrying. If it stopped: 'meander up', or restart your NATS server.",
	}
}

// admit waits until fewer than maxReads questions run. It returns lost while there is no connection.
func (s *server) admit(ctx context.Context) (release func(), err error) {
	if !s.bus.Conn().IsConnected() {
		return nil, s.lost()
	}
	select {
	case s.reads <- struct{}{}:
		return func() { <-s.reads }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// write sends an answer; a browser that does not read it in time is left.
func (s *server) write(w http.ResponseWriter, data []byte) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
	_, _ = w.Write(data) // the browser has gone
}

// fail answers with an error in words.
func (s *server) fail(w http.ResponseWriter, r *http.Request, err error) {
	var wrong *requestError
	status, says := http.StatusBadGateway, err.Error()
	switch {
	case errors.As(err, &wrong):
		status = wrong.status
	case errors.Is(err, bus.ErrPermission):
		status = http.StatusForbidden
	case errors.Is(err, client.ErrNotFound):
		status, says = http.StatusNotFound, "this is not stored, or no longer"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		status, says = http.StatusGatewayTimeout, "the server of the pipeline did not answer in time"
	default:
		s.log.Warn().Err(err).Str("path", r.URL.Path).Msg("the page could not be answered")
	}
	writeError(w, status, says)
}

// writeError answers with a status, and an error in words as JSON.
func writeError(w http.ResponseWriter, status int, says string) {
	data, _ := json.Marshal(map[string]string{"error": says}) // strings always encode
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(data) // the browser has gone
}

// TokenQuery begins what follows the address of a page in a link that signs a browser in.
const TokenQuery = "?token="

// session returns the name and the value of the cookie of browsers that have given the token. The value does not tell
// the token, and is another one at each start where the token is. Browsers send the cookies of a host to all of its
// ports, so the name has the port.
func (s *server) session(r *http.Request) (name, value string) {
	port := ""
	if at, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		_, port, _ = net.SplitHostPort(at.String())
	}
	of := hmac.New(sha256.New, []byte(s.cfg.Token))
	of.Write([]byte("session of a page of meander"))
	return "meander-" + port, hex.EncodeToString(of.Sum(nil))
}

// signedIn reports whether a request has the cookie of a browser that gave the token; or the token itself, as programs
// send it: Authorization, as Bearer, or as Basic with any name.
func (s *server) signedIn(r *http.Request) bool {
	name, value := s.session(r)
	if c, err := r.Cookie(name); err == nil && subtle.ConstantTimeCompare([]byte(c.Value), []byte(value)) == 1 {
		return true
	}
	given, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !bearer {
		_, given, _ = r.BasicAuth()
	}
	return s.isToken(given)
}

// givesToken reports whether a request is a link with a token, or the form that asks for it.
func givesToken(r *http.Request) bool {
	return r.URL.Path == "/" && (r.Method == http.MethodPost || r.URL.Query().Has("token"))
}

// isToken compares without telling by its time how much is right.
func (s *server) isToken(given string) bool {
	return subtle.ConstantTimeCompare([]byte(given), []byte(s.cfg.Token)) == 1
}

// signIn answers who has not signed in: with the page that asks for the token, or, where a link or that page gives it,
// with the cookie and the page without the token in its address. Other questions are refused.
func (s *server) signIn(w http.ResponseWriter, r *http.Request) {
	given, asks := "", r.URL.Path == "/"
	switch {
	case r.Method == http.MethodPost && asks:
		if new(http.CrossOriginProtection).Check(r) != nil {
			writeError(w, http.StatusForbidden, "only the page itself may sign in")
			return
		}
		if !readBody(w, r) {
			return
		}
		given = r.PostFormValue("token")
	case r.Method == http.MethodGet && asks:
		given = r.URL.Query().Get("token")
	case r.Method == http.MethodGet && (r.URL.Path == "/style.css" || r.URL.Path == "/icon.svg"):
		http.ServeFileFS(w, r, page, "page"+r.URL.Path)
		return
	}
	given = strings.TrimSpace(given)
	switch {
	case !asks:
		w.Header().Set("WWW-Authenticate", `Bearer realm="meander"`)
		writeError(w, http.StatusUnauthorized, "the page asks for a token: open the link that the command printed")
	case s.isToken(given):
		name, value := s.session(r)
		http.SetCookie(w, &http.Cookie{
			Name: name, Value: value, Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode,
			Secure: r.Header.Get("X-Forwarded-Proto") == "https", // of a proxy: the page has no TLS of its own
		})
		http.Redirect(w, r, "/", http.StatusSeeOther)
	default:
		form, err := page.ReadFile("page/signin.html")
		if err != nil {
			panic(err) // it is embedded
		}
		if given != "" {
			form = bytes.Replace(form, []byte(`id="wrong" hidden`), []byte(`id="wrong"`), 1)
		}
		w.Header().Set("WWW-Authenticate", `Bearer realm="meander"`)
		w.Header().Set("Content-Security-Policy",
			strings.Replace(policy, "form-action 'none'", "form-action 'self'", 1))
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.WriteHeader(http.StatusUnauthorized)
		s.write(w, form)
	}
}
