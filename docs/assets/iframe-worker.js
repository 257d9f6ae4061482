// Browsers start no Worker from a file. There the script runs in a hidden frame, so that the search works in a folder too.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.document.open();
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inside.document.createElement("script");
      script.src = url;
      this.ready = new Promise((done) => script.addEventListener("load", done));
      this.inside.document.append(this.inside.document.createElement("html"));
      this.inside.document.documentElement.append(script);
      this.inside.document.close();
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
