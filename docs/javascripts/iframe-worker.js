// A page that was opened as a file may start no worker: there the search runs in a hidden frame in place of one.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.ready = new Promise((resolve) => {
        frame.onload = () => {
          const inner = frame.contentWindow;
          const script = inner.document.createElement("script");
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          script.onload = () => resolve(inner);
          script.src = new URL(url, location.href).href;
          inner.document.head.append(script);
        };
      });
      frame.srcdoc = "<!DOCTYPE html>";
      document.body.append(frame);
    }

    postMessage(data) {
      this.ready.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
